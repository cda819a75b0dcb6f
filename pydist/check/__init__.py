"""Verifies partitioned networks: compares each layer with the unpartitioned network."""

from pydist.check.factory import load_factory
from pydist.check.report import Report, format_report
from pydist.check.run import check

__all__ = ["Report", "check", "format_report", "load_factory"]
