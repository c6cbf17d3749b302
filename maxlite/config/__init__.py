"""Every key, its type, default, unit and doc, declared once; YAML chain, environment and key=value; errors."""

from maxlite.config.command import read_command, report_input_error
from maxlite.config.errors import InputError
from maxlite.config.resolve import Config, Resolved, resolve
from maxlite.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TelemetryConfig,
)
from maxlite.config.show import config_yaml

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "InputError",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Resolved",
    "RunConfig",
    "TelemetryConfig",
    "config_yaml",
    "read_command",
    "report_input_error",
    "resolve",
]
