"""Planners that change or store plans, as mixins for stock's planners and ours."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan


class BalancesByCount:
    """``DDPLoadBalancingPlanner`` of torch's documentation."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None]
            for items in zip(*itertools.zip_longest(*iters), strict=True)
        ]
        all_plans = [
            dataclasses.replace(plan, items=items)
            for plan, items in zip(all_plans, items_per_rank, strict=True)
        ]
        return super().create_global_plan(all_plans)


class MakesNewPlans:
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(list(plan.items)) for plan in super().create_global_plan(global_plan)]


class StoresPlans:
    """As Megatron's planner does, to use them again after a restart."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = all_plans
        return plans, metadata
