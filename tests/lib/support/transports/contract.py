"""The contract of every transport: functions that all its ranks call."""

from __future__ import annotations

from collections.abc import Sequence

from support.transports import collectives, groups, messages
from support.transports.checks import Check

CHECKS: Sequence[Check] = (*messages.CHECKS, *collectives.CHECKS, *groups.CHECKS)
