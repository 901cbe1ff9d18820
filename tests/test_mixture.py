"""Which source gives each sample: as the weights say, on every shard, from any position, without a memory."""

from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pieces import made
from titan_moe.config import Config, DataSource
from titan_moe.config_check import check
from titan_moe.config_file import load, to_toml
from titan_moe.mixture import Mixture, Schedule, Shard, block_size, shards_of_source
from titan_moe.packing import State
from titan_moe.tokenizer import ByteTokenizer


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=4), st.sampled_from([1, 3, 4]), st.integers(0, 3))
def test_shares_are_exact_over_a_block_of_all_shards(weights: list[float], num_shards: int, block: int) -> None:
    N = block_size(weights)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts: Counter[int] = Counter()
    for shard in range(num_shards):
        schedule = Schedule(weights, shard, num_shards, 0)
        own = Counter(schedule.place(k)[0] for k in range(block * N, (block + 1) * N))
        assert all(abs(own[i] - N * share) <= 1 for i, share in enumerate(shares)), "no shard is far from the weights"
        counts += own
    assert all(abs(counts[i] - N * num_shards * share) <= 1 for i, share in enumerate(shares))


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=4), st.sampled_from([2, 3, 5]))
def test_shards_read_at_equal_rates(weights: list[float], num_shards: int) -> None:
    """After S blocks every shard has had the same number of each source's samples; and never is one far ahead."""
    N = block_size(weights)
    for block in range(1, num_shards + 1):
        counts = []
        for shard in range(num_shards):
            schedule = Schedule(weights, shard, num_shards, 0)
            first_of_next = [schedule.place(k) for k in range(block * N, block * N + N)]
            counts.append([min((n for i, n in first_of_next if i == source)) for source in range(len(weights))])
        spread = [max(column) - min(column) for column in zip(*counts, strict=True)]
        assert max(spread) <= (0 if block == num_shards else 1 + num_shards // 2)


def test_each_source_is_counted_without_a_gap() -> None:
    """Beginning at any sample gives what going there step by step does."""
    walked = Schedule([3, 1, 2.5], 1, 4, "seed")
    places = [walked.place(k) for k in range(6000)]
    for source in range(3):
        assert [n for i, n in places if i == source] == list(range(sum(i == source for i, _ in places)))
    for k in (5999, 1024, 1023, 0, 4096):
        assert Schedule([3, 1, 2.5], 1, 4, "seed").place(k) == places[k]


def test_seeds_and_shards_have_orders_of_their_own_and_scale_does_not_matter() -> None:
    def order(weights: list[float], shard: int, seed: int) -> list[int]:
        schedule = Schedule(weights, shard, 4, seed)
        return [schedule.place(k)[0] for k in range(1024)]

    orders = {tuple(order([1, 2], shard, seed)) for shard in range(4) for seed in range(2)}
    assert len(orders) == 8
    assert order([1, 2], 0, 0) == order([50, 100], 0, 0)
    assert order([1], 0, 0) == [0] * 1024


def test_the_order_of_a_mixture_is_fixed() -> None:
    schedule = Schedule([0.5, 0.3, 0.2], 5, 64, 0)
    order = "".join(str(schedule.place(k)[0]) for k in range(32))
    assert order == "01100100100022020020002000201000", "the order of all training on mixtures has changed"


def test_light_sources_get_long_blocks_or_a_refusal() -> None:
    assert block_size([1]) == block_size([1, 1]) == 1024
    assert block_size([1, 1 / 1024]) == 32768  # 16 points of the lighter one
    with pytest.raises(
        ValueError,
        match=r"\[1\]\.weight = 1e-07: is 1e-07 of the sum 1\.0000001, fewer than 16 samples in 1,048,5",
    ):
        block_size([1, 1e-7])


@given(st.integers(1, 128), st.integers(1, 300))
def test_shards_of_a_source(num_shards: int, num_pieces: int) -> None:
    count = shards_of_source(num_shards, num_pieces)
    assert num_shards % count == 0 and count <= num_pieces
    assert not [d for d in range(count + 1, min(num_shards, num_pieces) + 1) if num_shards % d == 0]


def test_a_source_of_few_pieces_is_shared_without_loss() -> None:
    """4 shards take turns at the samples of a source of 2 pieces, and at those of one of 1 piece."""
    sources = [made(*[50] * 8), made(30, 90), made(70, weight=0.5)]
    mixture = Mixture(sources, ByteTokenizer(), 4, 0)
    assert mixture.num_shards == 4 and [len(shards) for shards in mixture.pieces] == [4, 2, 1]
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)  # by source and dealt shard
    for s in range(4):
        shard = Shard(mixture, s, 16, [State()] * 3)
        for k in range(2 * 1024):
            i, n = shard.schedule.place(k)
            step, turn = shard.turns[i]
            taken[i, shard.streams[i].shard].append(n * step + turn)
    assert sorted(taken) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)]
    for numbers in taken.values():
        numbers.sort()
        # Each once; and none is left out but at the end, where shards may differ by a sample and another in each block.
        assert len(set(numbers)) == len(numbers) and numbers[: len(numbers) - 16] == list(range(len(numbers) - 16))


# ---------------------------------------------------------------------------------------------------------------------
# In TOML


def test_tables_are_read_and_printed(tmp_path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[[training.mixture]]\ndataset = "a/*.jsonl"\nweight = 2\ntext_field = "body"\n\n'
        '[[training.mixture]]\ndataset = "hf:me/texts:train"\non_error = "skip"\nadd_bos = false\n'
    )
    config = load([str(path)])
    assert config.training.mixture == [
        DataSource(dataset="a/*.jsonl", weight=2.0, text_field="body"),
        DataSource(dataset="hf:me/texts:train", on_error="skip", add_bos=False),
    ]
    path.write_text(to_toml(config))
    assert load([str(path)]) == config
    path.write_text("")
    assert load([str(path), '--training.mixture=[{dataset = "b"}]']).training.mixture == [DataSource(dataset="b")]


def test_a_mixture_takes_the_place_of_the_dataset_of_a_base(tmp_path) -> None:
    (tmp_path / "base.toml").write_text('training.dataset = "b"\n')
    path = tmp_path / "a.toml"
    for above in ("", 'training.dataset = ""\n'):
        path.write_text(f'base = "base.toml"\n{above}[[training.mixture]]\ndataset = "a"\n')
        config = load([str(path)])
        assert [source.dataset for source in config.training.mixture] == ["a"] and check(config, 1) == []
        alone = load([str(path), "--training.dataset=c", "--training.mixture=[]"]).training
        assert (alone.dataset, alone.mixture) == ("c", [])
        with pytest.raises(
            ValueError, match=r"would be ignored, because training\.mixture takes its place \(.*a\.toml:"
        ):
            load([str(path), "--training.dataset=c"])


def test_what_is_wrong_in_a_table_is_told(tmp_path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[[training.mixture]]\nwieght = 2\non_error = "skipp"\n')
    with pytest.raises(ValueError, match="training.mixture") as error:
        load([str(path)])
    unknown = "training.mixture[0].wieght = 2: unknown key (did you mean weight?)"
    for part in (unknown, "on_error = 'skipp': choose from", "needs dataset"):
        assert part in str(error.value)
    config = Config()
    config.training.mixture = [DataSource(dataset="", weight=0), DataSource(dataset="a", weight=float("nan"))]
    found = [problem for problem in check(config, 1) if "training.mixture" in problem]
    assert len(found) == 3 and "[0].dataset = " in found[0] and "[1].weight = nan: must" in found[2]
