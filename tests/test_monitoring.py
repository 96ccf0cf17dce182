"""Alerts and the dashboard: Prometheus takes the queries, each alert fires, and all figures in them are ones we report."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from cluster.measures import MEASURES
from tests.prometheus import FOLDER, PROMTOOL, needs_promtool, panel_queries, rule_groups

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def promtool(*arguments: str, folder: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_when_all_is_well(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    shutil.copy(FOLDER / "tests.yaml", tmp_path)
    promtool("check", "rules", "rules.yaml", folder=tmp_path)
    promtool("test", "rules", "tests.yaml", folder=tmp_path)


@needs_promtool
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(panel_queries())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", folder=tmp_path)


def test_every_alert_has_a_test_that_fires_it() -> None:
    alerts = {rule["alert"] for group in rule_groups() for rule in group["rules"] if "alert" in rule}
    tests = yaml.safe_load((FOLDER / "tests.yaml").read_text())["tests"]
    checked = [each for test in tests for each in test["alert_rule_test"]]
    assert {each["alertname"] for each in checked if each.get("exp_alerts")} == alerts
    assert {each["alertname"] for each in tests[0]["alert_rule_test"]} == alerts
    assert not any(each.get("exp_alerts") for each in tests[0]["alert_rule_test"])


def test_every_figure_in_alerts_and_dashboard_is_one_that_we_report() -> None:
    rules = [rule for group in rule_groups() for rule in group["rules"]]
    known = {name + suffix for name, measure in MEASURES.items() for suffix in _SUFFIXES[measure.kind]}
    known |= {rule["record"] for rule in rules if "record" in rule}
    queries = [rule["expr"] for rule in rules] + list(panel_queries())
    used = {name for query in queries for name in re.findall(r"\b(?:paceline[_:]|vllm:)[\w:]+", query)}
    assert len(used) > 20
    assert used <= known, used - known
