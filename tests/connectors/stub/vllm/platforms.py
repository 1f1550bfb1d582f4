"""The platform."""

from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cuda")
