"""Trainers and agents that are killed at any moment: every restart finds exactly a whole step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kills import AgentCampaign, end_agents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the agents of a campaign with its test."""
    yield
    end_agents(tmp_path)


def test_a_few_kills_of_every_kind_lose_no_step_that_was_whole(tmp_path: Path, seed: int) -> None:
    campaign = AgentCampaign(tmp_path / "run", seed)
    campaign.run(12)
    assert not campaign.breaches, campaign.report()
    assert campaign.kills.total() == 12
    assert campaign.found["memory"] > 6, campaign.report()


def test_200_kills_lose_no_step_that_was_whole(tmp_path: Path, seed: int) -> None:
    campaign = AgentCampaign(tmp_path / "run", seed)
    campaign.run(200)
    print(campaign.report())
    assert not campaign.breaches, campaign.report()


def test_the_campaign_notices_slots_that_are_complete_before_they_are_filled(
    tmp_path: Path, seed: int
) -> None:
    campaign = AgentCampaign(tmp_path / "run", seed, torn=True)
    campaign.run(100)
    assert campaign.breaches, campaign.report()
