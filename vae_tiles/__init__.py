"""Decode any latent on any card: VAE tiles that agree, sized from measured peaks.

The public names are imported on first use, so that `import vae_tiles` does not wait for torch.
"""

__version__ = "0.1.0"

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .estimates import estimate_decode, estimate_encode
    from .installing import decode, encode, install
    from .measure import measure_peaks
    from .peaks import capped, is_oom
    from .planning import Plan, plan
    from .vaes import tiling

__all__ = ["Plan", "capped", "decode", "encode", "estimate_decode", "estimate_encode", "install", "is_oom",
           "measure_peaks", "plan", "tiling"]

_homes = {
    "installing": ("install", "decode", "encode"),
    "planning": ("Plan", "plan"),
    "estimates": ("estimate_decode", "estimate_encode"),
    "measure": ("measure_peaks",),
    "peaks": ("capped", "is_oom"),
    "vaes": ("tiling",),
}
_home_of = {name: home for home, names in _homes.items() for name in names}


def __getattr__(name: str):
    if name not in _home_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_home_of[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
