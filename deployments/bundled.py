"""The bundled pair as a built application, for `serve build`, which takes no builder: deployments.bundled:application."""

from deployments.app import build
from deployments.config import ServeConfig

application = build(ServeConfig())
