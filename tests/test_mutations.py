"""Every fault of tests/mutations.py is noticed by the parity check that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.test_parity import Disagreement, check_forward

Report = Callable[[Mutation, str], None]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    """Rows of the table that is printed at the end (see it with `pytest -s`)."""
    rows: list[tuple[str, str, str]] = []

    def add(mutation: Mutation, outcome: str) -> None:
        rows.append((mutation.name, mutation.check_name, outcome))

    yield add
    print(f"\n\n{'mutation':44} {'check':42} caught with")
    for name, check, outcome in rows:
        print(f"{name:44} {check:42} {outcome}")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_mutation_is_caught(mutation: Mutation, report: Report) -> None:
    mutation.check()
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        with pytest.raises(Disagreement) as caught:
            mutation.check()
    report(mutation, str(caught.value))


@pytest.mark.parametrize("target", ["model.no_such_name", "model.Attention.no_such_name"])
def test_mutation_of_a_name_that_is_gone_fails(target: str) -> None:
    mutation = Mutation(target, lambda original: None, MUTATIONS[0].check)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AttributeError, match="no_such_name"):
        mutation.apply(patch)


def test_replacement_that_changes_nothing_passes_the_check() -> None:
    """The harness itself disturbs nothing: what is caught is the fault."""
    with pytest.MonkeyPatch.context() as patch:
        for target in {mutation.target for mutation in MUTATIONS}:
            Mutation(
                target, lambda original, *args, **kwargs: original(*args, **kwargs), MUTATIONS[0].check
            ).apply(patch)
        check_forward("base", 65)
