"""A sample of the faults that `make exact` runs in full."""

from engine.runner import ModelRunner
from tests import exact, faults


def test_outputs_are_equal_and_nothing_is_left_when_requests_are_cancelled_and_replicas_killed(
    target: ModelRunner,
) -> None:
    prompts = [prompt[:20] for prompt in exact.load_prompts(6)]
    cases = faults.faults_matrix(target, prompts, 16, cancellations=30, draft_kills=2, target_kills=1)
    assert [case.run()[1] for case in cases] == [[], [], []]
