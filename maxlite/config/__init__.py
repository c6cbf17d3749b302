"""Every key, its type, default, unit and doc, declared once; YAML chain, environment and key=value; errors."""

from maxlite.config.errors import InputError
from maxlite.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TelemetryConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "InputError",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TelemetryConfig",
]
