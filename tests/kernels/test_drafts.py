"""Drafts of speculative decoding: both implementations against a plain search."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from kernel_tools import in_reference, in_triton

from meltcore.kernels.sampling import drafts as drafts_file
from meltcore.kernels.sampling.drafts import (
    DraftTables,
    NgramSizes,
    SyntheticAcceptance,
    accept_and_propose,
    acceptance_probability,
    follow_windows,
    start_histories,
)


class Sequence(NamedTuple):
    """A sequence before a step, and what the step is given for it."""

    row: int
    history: list[int]
    drafts: list[int]
    sampled: list[int]
    max_drafts: int = 7


def expected(sequence: Sequence, lookup: NgramSizes, k: int, columns: int) -> tuple[list[int], list[int]]:
    """The accepted tokens and the next drafts, by a plain search."""
    tokens: list[int] = []
    for token, draft in zip(sequence.sampled, [*sequence.drafts[: len(sequence.sampled) - 1], None], strict=True):
        tokens.append(token)
        if token != draft:
            break
    text = sequence.history + tokens
    limit = min(sequence.max_drafts, k, columns - 1 - len(text))
    for size in range(lookup.longest, lookup.shortest - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends and limit > 0:
            for index in range(limit):
                text.append(text[ends[-1] + index])  # beyond the end those just appended
            return tokens, text[-limit:]
    return tokens, []


def tables_of(sequences: list[Sequence], k: int, max_model_len: int, rows: int, device: torch.device) -> DraftTables:
    tables = DraftTables.allocate(rows, max_model_len, k, device)
    tables.histories.fill_(-9)
    tables.drafts.fill_(77)  # of earlier sequences: the start forgets them
    tables.num_drafts.fill_(5)
    first_tokens = [0, *accumulate(len(each.history) for each in sequences)]
    rows_, first, ids = tensors([each.row for each in sequences], first_tokens, flat(sequences, "history"))
    start_histories(tables, *(each.to(device) for each in (rows_, first, ids)))
    for each in sequences:
        tables.drafts[each.row, : len(each.drafts)] = torch.tensor(each.drafts, dtype=torch.int64).to(device)
        tables.num_drafts[each.row] = len(each.drafts)
    return tables


def flat(sequences: list[Sequence], name: str) -> list[int]:
    return [token for each in sequences for token in getattr(each, name)]


def tensors(*values: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.int64) for each in values]


def step(
    tables: DraftTables,
    sequences: list[Sequence],
    lookup: NgramSizes | None,
    synthetic: SyntheticAcceptance | None = None,
) -> list[list[int]]:
    first_tokens = [0, *accumulate(len(each.sampled) for each in sequences)]
    given = tensors(
        [each.row for each in sequences],
        first_tokens,
        flat(sequences, "sampled"),
        [each.max_drafts for each in sequences],
    )
    on_device = [each.to(tables.drafts.device) for each in given]
    outcomes = accept_and_propose(tables, *on_device, lookup, synthetic).tolist()
    # The host reads the same drafts as the next step.
    for each, (_, num_drafts, *drafts) in zip(sequences, outcomes, strict=True):
        assert drafts[num_drafts:] == [-1] * (len(drafts) - num_drafts)
        if each.row:
            assert tables.drafts[each.row].tolist() == drafts
            assert int(tables.num_drafts[each.row]) == num_drafts
    return outcomes


def history_of(tables: DraftTables, row: int) -> list[int]:
    return tables.histories[row, : int(tables.lengths[row])].tolist()


def alone(
    sequence: Sequence, lookup: NgramSizes, device: torch.device, k: int = 4, max_model_len: int = 99
) -> list[int]:
    """The drafts that a sequence gets."""
    tables = tables_of([sequence], k, max_model_len, 3, device)
    _, num_drafts, *drafts = step(tables, [sequence], lookup)[0]
    return drafts[:num_drafts]


PADDING = Sequence(0, [], [], [5, 6])


def test_sequences_start_with_their_tokens_and_without_drafts() -> None:
    """Rows 3 and 1 start; row 2 keeps what it has."""
    sequences = [Sequence(3, [4, 5, 6], [], []), Sequence(1, [7], [], [])]
    tables = tables_of(sequences, 2, 3, 4, torch.device("cpu"))
    assert tables.histories.tolist() == [[-9] * 4, [7, -9, -9, -9], [-9] * 4, [4, 5, 6, -9]]
    assert tables.lengths.tolist() == [0, 1, 0, 3]
    assert tables.drafts[1:].tolist() == [[-1, -1], [77, 77], [-1, -1]]
    assert tables.num_drafts[1:].tolist() == [0, 5, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("k", "longest", "shortest"), [(7, 3, 1), (2, 4, 2)])
def test_steps_equal_a_plain_search(
    k: int, longest: int, shortest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of three tokens repeat often; windows have all sizes; the longest histories become full."""
    monkeypatch.setattr(drafts_file, "_BLOCK", 16)
    chance, max_model_len, lookup = random.Random(k), 50, NgramSizes(longest, shortest)
    rows = chance.sample(range(1, 9), 6)
    sequences = [
        Sequence(row, [chance.randrange(3) for _ in range(length)], [], [])
        for row, length in zip(rows, [1, 2, 15, 30, 44, 50], strict=True)
    ]
    tables = tables_of(sequences, k, max_model_len, 9, device)
    untouched = next(row for row in range(1, 9) if row not in rows)
    yields: set[int] = set()
    for _ in range(6):
        sequences = [drawn(each, chance) for each in sequences if len(each.history) <= max_model_len]
        given = [PADDING, *sequences, PADDING]
        outcomes = step(tables, given, lookup)
        assert outcomes[0] == outcomes[-1] == [0, 0, *[-1] * k]
        for index, (each, outcome) in enumerate(zip(sequences, outcomes[1:-1], strict=True)):
            tokens, drafts = expected(each, lookup, k, max_model_len + 1)
            assert outcome == [len(tokens), len(drafts), *drafts, *[-1] * (k - len(drafts))]
            yields.add(len(tokens))
            sequences[index] = each._replace(history=each.history + tokens, drafts=drafts)
            assert history_of(tables, each.row) == sequences[index].history
        assert int(tables.lengths[0]) == int(tables.lengths[untouched]) == 0
        assert set(tables.histories[[0, untouched]].flatten().tolist()) == {-9}
    assert {1, 2, k + 1} <= yields


def drawn(sequence: Sequence, chance: random.Random) -> Sequence:
    """A window of some of the drafts, of which a draw often accepts many."""
    verified = chance.randint(0, len(sequence.drafts)) if chance.random() < 0.2 else len(sequence.drafts)
    sampled = [draft if chance.random() < 0.95 else chance.randrange(3) for draft in sequence.drafts[:verified]]
    return sequence._replace(sampled=[*sampled, chance.randrange(3)], max_drafts=chance.choice((0, 1, 7, 7, 7)))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("history", "lookup", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], NgramSizes(2, 2), [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], NgramSizes(3, 1), []),
        ([1, 2, 3, 4, 9, 2, 5, 6, 7, 8, 1, 2], NgramSizes(2, 1), [3, 4, 9, 2]),  # the longer n-gram, not the later
        ([1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 8, 1, 2], NgramSizes(2, 1), [5, 6, 7, 8]),  # the later of equal ones
        ([1, 2, 3, 4, 9, 2, 5, 6, 7, 8, 1, 2], NgramSizes(1, 1), [5, 6, 7, 8]),
        ([4, 4, 4, 4], NgramSizes(2, 1), [4, 4, 4, 4]),  # a text of period 1 goes on
        ([9, 1, 2, 3, 1, 2, 3], NgramSizes(3, 2), [1, 2, 3, 1]),
        ([1, 2, 1], NgramSizes(3, 2), []),
        ([1], NgramSizes(3, 1), []),
    ],
)
def test_drafts_follow_the_latest_longest_ngram(
    history: list[int], lookup: NgramSizes, drafts: list[int], device: torch.device
) -> None:
    """The last token of the history is the one that the step draws."""
    sequence = Sequence(2, history[:-1], [], history[-1:])
    assert alone(sequence, lookup, device) == drafts
    assert alone(sequence._replace(max_drafts=2), lookup, device) == drafts[:2]
    assert alone(sequence._replace(max_drafts=0), lookup, device) == []
    # Of a model of 3 more positions: a window of 3 tokens, that is 2 drafts, fits.
    assert alone(sequence, lookup, device, max_model_len=len(history) + 2) == drafts[:2]


@pytest.mark.usefixtures("implementation")
def test_what_is_one_position_off_has_other_results(device: torch.device) -> None:
    """Each wrong table or input of this step changes its result, so the other tests would see such a fault."""
    lookup, text = NgramSizes(3, 2), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    first = Sequence(1, [*text], [4, 5, 6], [4, 5, 9, 9])
    second = Sequence(2, [8, 9, *text], [4, 5, 6], [4, 5, 6, 7])

    def outcome(*, drafts: int = 0, length: int = 0, history: int = 0, sequences: list[Sequence]) -> list[object]:
        tables = tables_of([first, second], 3, 60, 3, device)
        tables.drafts.copy_(tables.drafts.roll(drafts, 1))
        tables.lengths.add_(length)
        tables.histories.copy_(tables.histories.roll(history, 1))
        return [step(tables, sequences, lookup), [history_of(tables, row) for row in (1, 2)]]

    right = outcome(sequences=[first, second])
    assert right[0] == [[3, 0, -1, -1, -1], [4, 3, 8, 1, 2]]
    longer = [first._replace(sampled=[4, 5, 9, 9, 4]), second._replace(sampled=[5, 6, 7])]
    swapped = [first._replace(row=2), second._replace(row=1)]
    wrong = [outcome(sequences=longer), outcome(sequences=swapped)]
    for shift in (-1, 1):
        wrong += [outcome(sequences=[first, second], **{name: shift}) for name in ("drafts", "length", "history")]
    assert [each for each in wrong if each == right] == []


def test_kernel_equals_the_reference_with_synthetic_acceptance(device: torch.device) -> None:
    """The text is what was drawn, also where a draft differs from it; every window gets its drafts."""
    k, lookup = 3, NgramSizes(2, 2)
    chance = random.Random(8)
    synthetic = SyntheticAcceptance(torch.tensor([0.9, 0.6, 0.3], device=device), 2**62 + 12345)
    start = [Sequence(row, [chance.randrange(9) for _ in range(4)], [], [row]) for row in range(1, 9)]
    ran = []
    for function in (in_reference(step), in_triton(step)):
        tables, sequences, outcomes = tables_of(start, k, 99, 9, device), start, []
        for number in range(4):
            outcomes.append(function(tables, [PADDING, *sequences], lookup, synthetic))
            sequences = [
                Sequence(each.row, [], outcome[2:], [100 * number + column for column in range(1 + outcome[1])])
                for each, outcome in zip(sequences, outcomes[-1][1:], strict=True)
            ]
        ran.append([outcomes, [history_of(tables, each.row) for each in start]])
        assert all(outcome[1] == k for outcome in outcomes[-1][1:])
        assert {outcome[0] for of_step in outcomes[1:] for outcome in of_step[1:]} == {1, 2, 3, 4}
        assert all(set(history[5:]) <= {*range(4), *range(100, 104), *range(200, 204)} for history in ran[-1][1])
    assert ran[0] == ran[1]


@pytest.mark.usefixtures("implementation")
def test_without_a_lookup_drafts_are_only_accepted(device: torch.device) -> None:
    """MTP drafts by itself. It needs no histories, whose tables may be without columns."""
    sequence = Sequence(1, [], [4, 5, 6], [4, 5, 9, 9])
    for columns in (0, 20):
        tables = tables_of([sequence], 3, columns - 1, 2, device)
        assert step(tables, [sequence], None) == [[3, 0, -1, -1, -1]]
        assert int(tables.lengths[1]) == 3


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("is_following", [0, 1])
def test_windows_that_follow_get_their_drafts_and_positions(device: torch.device, is_following: int) -> None:
    """Rows in any order, windows of one token and of more, missing drafts, padding, and several blocks of tokens."""
    draw = random.Random(3)
    tables = DraftTables.allocate(121, 0, 3, device)
    tables.lengths[1:] = torch.tensor([draw.randint(1, 900) for _ in range(120)]).to(device)
    tables.drafts[1:] = torch.tensor([[draw.randint(-1, 50) for _ in range(3)] for _ in range(120)]).to(device)
    rows = draw.sample(range(1, 121), 110)
    sizes = [draw.choice([1, 4]) for _ in rows]
    token_ids, positions, token_rows, tiles, expected = [], [], [], [], []
    for row, size in zip(rows, sizes, strict=True):
        tiles.append([row, len(token_ids), size, 0])
        token_ids += [7, -1, -1, -1][:size]
        positions += range(size)
        token_rows += [row] * size
        start = int(tables.lengths[row]) - 1
        ids = [-1, *(max(0, draft) for draft in tables.drafts[row].tolist())][:size]
        expected += [(token_id, start + index) for index, token_id in enumerate(ids)]
    padding = 520 - len(token_ids)
    given = tensors(
        [is_following],
        [*token_ids, *[5] * padding],
        [*positions, *[0] * padding],
        [*token_rows, *[0] * padding],
        [*rows, 0, 0],
        [*[0] * len(rows), -1, -1],
    )
    tile_array = torch.tensor([*tiles, [0, len(token_ids), padding, 0]], dtype=torch.int32).flatten().view(torch.int64)
    on_device = [each.to(device) for each in (*given, tile_array)]
    follow_windows(tables, *on_device)
    if not is_following:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, (*given, tile_array), strict=True))
        return
    found = list(zip(on_device[1].tolist(), on_device[2].tolist(), strict=True))
    assert found == expected + [(5, 0)] * padding
    starts = [int(tables.lengths[row]) - 1 for row in rows]
    assert on_device[5].tolist() == [*starts, -1, -1]
    found_tiles = on_device[6].view(torch.int32).view(-1, 4).tolist()
    assert found_tiles == [[*tile[:3], start] for tile, start in zip(tiles, starts, strict=True)] + [
        [0, len(token_ids), padding, 0]
    ]


@pytest.mark.parametrize("length", [1.0, 2.5, 3.33, 4.0])
def test_synthetic_windows_yield_the_given_tokens_on_average(length: float) -> None:
    """2,000 sequences: the mean is within 5 standard errors, and exact where each draft is sure."""
    count, device = 2000, torch.device("cpu")
    tables = DraftTables.allocate(count + 1, 0, 3, device)
    tables.num_drafts.fill_(3)
    synthetic = SyntheticAcceptance.of_length(length, 3, 7, device)
    rows, sampled = torch.arange(1, count + 1), torch.zeros(4 * count, dtype=torch.int64)
    outcomes = accept_and_propose(tables, rows, torch.arange(count + 1) * 4, sampled, rows, None, synthetic)
    num_tokens = outcomes[:, 0].double()
    error = 5 * float(num_tokens.std()) / count**0.5
    assert float(num_tokens.mean()) == pytest.approx(length, abs=error)


def test_acceptance_probability_solves_for_the_mean() -> None:
    for k in range(1, 8):
        for length in (1.0, 1.0 + k / 3, 1.0 + k):
            probability = acceptance_probability(length, k)
            assert sum(probability**power for power in range(k + 1)) == pytest.approx(length)
    for length in (0.99, 4.01):
        with pytest.raises(
            ValueError, match=f"synthetic_acceptance_length {length}: a step with 3 drafts yields 1 to 4"
        ):
            acceptance_probability(length, 3)
