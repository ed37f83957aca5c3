"""The worker's room: what moves the bytes."""

from forebay.copier.base import Copier

__all__ = ["Copier"]
