"""Traces: files of requests, whatever their format, as the planner reads them."""

from forebay.plan.traces.files import FileTrace
from forebay.plan.traces.opening import open_trace

__all__ = ["FileTrace", "open_trace"]
