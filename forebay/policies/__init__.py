"""Eviction policies by name, or any class as `module:Class`."""

from __future__ import annotations

from importlib import import_module

from forebay.errors import PolicyError
from forebay.policies.arc import ARC
from forebay.policies.base import Policy
from forebay.policies.lru import LRU
from forebay.policies.s3fifo import S3FIFO

__all__ = ["ARC", "LRU", "POLICIES", "S3FIFO", "Policy", "policy_class"]

POLICIES: dict[str, type[Policy]] = {"lru": LRU, "s3fifo": S3FIFO, "arc": ARC}


def policy_class(name: str) -> type[Policy]:
    """The class that `eviction_policy: name` means."""
    allowed = f"one of {', '.join(POLICIES)}, or 'module:Class' of a forebay.policies.Policy"
    if not isinstance(name, str):
        raise PolicyError("eviction_policy", name, allowed)
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise PolicyError("eviction_policy", name, allowed)
    try:
        found: object = getattr(import_module(module_name), class_name)
    except Exception as error:
        raise PolicyError("eviction_policy", name, f"{allowed} ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError("eviction_policy", name, f"{allowed} (it is {found!r})")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise PolicyError("eviction_policy", name, f"{allowed} (it lacks {', '.join(missing)})")
    return found
