"""Summary of property tests at the end of a run: networks that ran, and refused calls."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for each in terminalreporter.stats.values() for r in each]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "networks" and report.when == "call":
                terminalreporter.write_line(value)
