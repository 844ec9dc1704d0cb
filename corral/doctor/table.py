"""The table every module of rules adds its rows to, and nothing else."""

from __future__ import annotations

from corral.doctor.model import Table

TABLE = Table()
check = TABLE.check
