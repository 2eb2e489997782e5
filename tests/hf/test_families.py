"""Every causal family of transformers is served with the right tokens or refused.

Each family is tried with a tiny model, through `VMKVCache`, `vmkv.generate` and an engine, and must
come out as `vmkv/hf/MODELS.md` says. After a change of the outcome: `make models`.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import transformers
from helpers import families, survey
from helpers.planned import check_planned

from vmkv import ConfigError
from vmkv.hf.proof import prove

pytestmark = pytest.mark.slow
if f"transformers {transformers.__version__}" not in survey.TABLE.read_text():
    pytest.skip("MODELS.md is of another release", allow_module_level=True)


@functools.cache
def _lines() -> dict[str, str]:
    """Rows of the table, by family."""
    rows = survey.TABLE.read_text().splitlines(keepends=True)
    return {row.split("|")[1].strip(): row for row in rows if row.startswith("| ")}


@pytest.mark.parametrize("family", families.surveyed())
def test_a_family_is_served_or_refused_as_the_table_says(family: str) -> None:
    """Never with wrong tokens or an error of another library; the proof agrees in bfloat16.

    What a served family keeps is what `vmkv plan` promises.
    """
    model = None if family in families.UNBUILDABLE else survey.model_of(family)
    verdict = survey.verdict(family, model)
    assert _lines()[family] == verdict.row(family)
    if verdict.generate == "refused":
        if "VMKVCache(config)" in verdict.instead:
            assert verdict.cache == survey.SERVED, (
                "the error proposes VMKVCache, which does not serve the family"
            )
        else:
            assert "model.generate" in verdict.instead
    if model is not None and verdict.engine == survey.SERVED:
        check_planned(model, families.tiny_config(family))
    if model is not None and verdict.generate != survey.NOT_TRIED:
        # Rounding neither hides a defect nor causes one.
        is_served = verdict.generate == survey.SERVED
        with contextlib.nullcontext() if is_served else pytest.raises(ConfigError):
            prove(model.bfloat16())


def test_the_table_lists_every_family_and_counts_them() -> None:
    """It has no other rows."""
    assert [*_lines()] == ["family", "---", *families.surveyed()]
    columns = [[cell.strip() for cell in row.split("|")] for row in [*_lines().values()][2:]]
    tried = [survey.Verdict(*row[2:6]) for row in columns]
    assert survey.TABLE.read_text().startswith(survey.prologue(tried))
