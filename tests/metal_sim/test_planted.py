"""Every planted bug is caught, and by what it should be; the subjects themselves are clean."""

from __future__ import annotations

import pytest

from . import metal_kernel, options
from .planted import SUBJECTS, TABLE, Planted, Subject, assert_caught, catch


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_unchanged_subject_passes(subject: Subject, order: str) -> None:
    with options(order=order):
        subject.run(metal_kernel)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.subject}: {row.bug}")
def test_planted_bug_is_caught(row: Planted) -> None:
    assert_caught(SUBJECTS[row.subject], row)


def test_bug_that_cannot_be_planted_is_an_error() -> None:
    row = Planted("rotate", "nowhere", "no such text", "", "nothing")
    with pytest.raises(ValueError, match="no kernel of 'rotate' contains 'no such text'"):
        catch(SUBJECTS["rotate"], row)
