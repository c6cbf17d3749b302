"""Every key, its type, default, unit and doc, declared once; YAML chain, environment and key=value; errors."""

from maxlite.config.command import read_command, report_input_error
from maxlite.config.errors import Exit, InputError
from maxlite.config.resolve import Config, Resolved, resolve
from maxlite.config.run_directory import LOCK_NAME, RunDirectory
from maxlite.config.sections import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TelemetryConfig,
)

__all__ = [
    "LOCK_NAME",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "DataConfig",
    "Exit",
    "InputError",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Resolved",
    "RunConfig",
    "RunDirectory",
    "TelemetryConfig",
    "read_command",
    "report_input_error",
    "resolve",
]
