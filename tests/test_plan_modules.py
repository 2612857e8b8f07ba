"""Plans for modules that the cost model does not know: proved like all others, refused by name."""

from __future__ import annotations

import pytest

from optimus.errors import UserError
from optimus.ir.module_times import EncoderBlocks, Seconds
from optimus.ir.plan import Plan
from optimus.planner.user_modules import plan_modules
from optimus.verify.validator import check_plan

STAGE = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0, send_s=0.01)
BLOCK = Seconds(forward_s=0.1, backward_s=0.2)
FROZEN = Seconds(forward_s=0.1, backward_s=0.0)


def plan(ranks: int, pp: int, stages: int, order: str, encoder_pp: int, pieces: int) -> Plan:
    encoders = {
        "images": EncoderBlocks(blocks=[BLOCK] * 4, pp=encoder_pp, pieces=pieces),
        "sounds": EncoderBlocks(blocks=[FROZEN, BLOCK]),
        "frozen": EncoderBlocks(blocks=[FROZEN] * 2),
    }
    return plan_modules(
        stages=[STAGE] * stages, encoders=encoders, microbatches=4, ranks=ranks, pp=pp, order=order
    )


@pytest.mark.parametrize(
    ("ranks", "pp", "stages", "order", "encoder_pp", "pieces"),
    [
        (2, 2, 2, "1f1b", 1, 1),
        (4, 2, 4, "", 2, 2),
        (4, 4, 4, "zero-bubble", 2, 1),
        (8, 4, 8, "interleaved", 4, 2),
        (3, 1, 1, "", 1, 1),
    ],
)
def test_plans_hold_all_rules(
    ranks: int, pp: int, stages: int, order: str, encoder_pp: int, pieces: int
) -> None:
    report = check_plan(plan(ranks, pp, stages, order, encoder_pp, pieces))
    assert report.ok, report.violations[:3]


def test_filling_beats_the_encoder_in_front_of_the_llm() -> None:
    found = plan_modules(
        stages=[STAGE] * 2,
        encoders={"images": EncoderBlocks(blocks=[Seconds(forward_s=0.5, backward_s=1.0)])},
        microbatches=8,
        ranks=2,
        pp=2,
    )
    work = 8 * (2 * 3.0 + 1.5) / 2  # of each rank
    in_stage_0 = 8 * (3.0 + 1.5) + 1.0 + 2.0
    assert work <= found.claims.step_s < 1.1 * work < in_stage_0


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    for wrong, field in (
        ({"pp": 3}, "pp"),
        ({"encoders": {"images": EncoderBlocks(blocks=[BLOCK] * 4, pp=3)}}, "encoders.images.pp"),
        ({"encoders": {"images": EncoderBlocks(blocks=[BLOCK], pp=2)}}, "encoders.images.pp"),
    ):
        given = {"stages": [STAGE] * 4, "encoders": {}, "microbatches": 4, "ranks": 4, "pp": 4, **wrong}
        with pytest.raises(UserError) as error:
            plan_modules(**given)  # type: ignore[arg-type]
        assert error.value.field == field
