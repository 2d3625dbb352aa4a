"""Mistakes in orders are told before anybody is asked."""

from __future__ import annotations

from typing import get_args

from typer.testing import CliRunner

from controller.policies.table import NAMES
from kvcomm.cli.app import app
from kvcomm.cli.orders import Policy


def test_the_policies_are_those_that_there_are():
    assert get_args(Policy) == NAMES


def test_a_wrong_policy_is_a_mistake_in_the_command():
    result = CliRunner().invoke(app, ["rebalance", "--policy", "foo"], env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert "'threshold'" in result.stderr and "'greedy'" in result.stderr


def test_a_range_without_its_signs_moves_nothing():
    result = CliRunner().invoke(app, ["move", "25-50", "--to", "shard-3"])
    assert isinstance(result.exception, ValueError), "kvcomm ends with code 2 then"
    assert "0xFIRST-0xLAST" in str(result.exception) and "FROM%-TO%" in str(result.exception)
