"""The training stream: tokenised once, whatever interrupts it; cut into windows, shuffled by the seed alone."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import toy_documents
from tide.cli import UserError
from tide.training import data as data_module
from tide.training.data import ShardWriter, TokenShards, WindowDataset, encode_documents, token_dtype, tokenize
from tide.training.sources import DataSource

SHARD = 1100  # tokens: the toy text fills several


class Killed(BaseException):
    """Stands for a kill inside this process."""


def shards_of(folder, tokenizer, cache=None, **options):
    return tokenize(DataSource.parse(str(folder)), tokenizer, cache, show_progress=False, **options)


def files_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def stream_of(shards):
    return shards.read(0, shards.num_tokens)


def write_text(folder, *seeds):
    folder.mkdir(exist_ok=True)
    for seed in seeds:
        (folder / f"train_{seed}.txt").write_text("\n\n".join(toy_documents(20, seed)))
    return folder


def write_shards(folder, documents, shard_tokens, vocab_size=1000):
    writer = ShardWriter(folder, "text", vocab_size, shard_tokens)
    for ids in documents[writer.documents :]:
        writer.add(np.asarray(ids, dtype=np.int64))
    writer.finish()
    return TokenShards.open(folder)


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def shards(data_folder, tokenizer, tmp_path_factory):
    return shards_of(data_folder, tokenizer, tmp_path_factory.mktemp("cache"), shard_tokens=SHARD)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """103 tokens in shards of 10, whose ids are their positions."""
    return write_shards(tmp_path_factory.mktemp("numbered"), [range(40), range(40, 103)], shard_tokens=10)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A data folder of four shards."""
    return write_text(tmp_path_factory.mktemp("text"), 0, 1)


@pytest.fixture(scope="module")
def whole(text, tokenizer, tmp_path_factory):
    """The files of a tokenisation that nothing interrupted."""
    shards = shards_of(text, tokenizer, tmp_path_factory.mktemp("whole"), shard_tokens=SHARD)
    assert len(list(shards.folder.glob("shard-*"))) == 4
    return files_in(shards.folder)


class TestStream:
    def test_it_is_every_document_with_its_mark_in_front(self, tokenizer, shards):
        documents = toy_documents(60, seed=0) + toy_documents(60, seed=1)  # train_a, train_b
        stream = stream_of(shards)
        assert (stream == tokenizer.bos_token_id).sum() == len(documents)
        assert stream[0] == tokenizer.bos_token_id
        assert tokenizer.decode(stream).split(tokenizer.bos_token)[1:] == documents

    def test_a_closing_mark_is_written_where_the_tokenizer_has_its_own(self, tokenizer, tmp_path):
        closing = type(tokenizer)(
            tokenizer_object=tokenizer.backend_tokenizer, bos_token=tokenizer.bos_token, eos_token=tokenizer.pad_token
        )
        (ids,) = encode_documents(iter(["At night."]), closing)
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, closing.eos_token_id)
        write_text(tmp_path, 0)
        with_mark, without = shards_of(tmp_path, closing), shards_of(tmp_path, tokenizer)
        assert with_mark.num_tokens == without.num_tokens + 20

    def test_counts_are_those_of_the_stream(self, tokenizer, shards):
        assert shards.vocab_size == len(tokenizer) == len(shards.counts)
        assert shards.counts.dtype == np.int64
        assert shards.counts.tolist() == np.bincount(stream_of(shards), minlength=len(tokenizer)).tolist()

    def test_the_files_are_the_stream_and_nothing_else(self, shards):
        files = sorted(shards.folder.glob("shard-*.uint16"))
        assert len(files) > 3
        assert [file.stat().st_size for file in files[:-1]] == [2 * SHARD] * (len(files) - 1)
        assert np.array_equal(np.concatenate([np.fromfile(file, dtype="<u2") for file in files]), stream_of(shards))
        names = {file.name for file in shards.folder.iterdir()}
        assert names == {file.name for file in files} | {"index.json", "counts.safetensors"}

    def test_large_vocabularies_are_stored_in_four_bytes(self, tmp_path):
        assert token_dtype(65_536) == np.uint16
        assert token_dtype(65_537) == np.uint32
        stored = write_shards(tmp_path, [[70_000, 3], [69_999]], shard_tokens=2, vocab_size=70_001)
        assert stream_of(stored).tolist() == [70_000, 3, 69_999]
        assert stored.counts[[3, 69_999, 70_000]].tolist() == [1, 1, 1]

    @pytest.mark.parametrize("max_tokens", [1, SHARD - 1, SHARD, SHARD + 1, 2 * SHARD, 10**9])
    def test_max_tokens_cuts_the_stream_exactly(self, data_folder, tokenizer, tmp_path, shards, max_tokens):
        cut = shards_of(data_folder, tokenizer, tmp_path, max_tokens=max_tokens, shard_tokens=SHARD)
        assert cut.num_tokens == min(max_tokens, shards.num_tokens)
        assert np.array_equal(stream_of(cut), stream_of(shards)[:max_tokens])
        assert cut.counts.sum() == cut.num_tokens

    @given(
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
        shard_tokens=st.integers(1, 15),
        place=st.integers(0, 150),
        length=st.integers(0, 150),
    )
    @settings(max_examples=40)
    def test_reading_crosses_the_borders_of_shards(self, tmp_path_factory, lengths, shard_tokens, place, length):
        stream = np.arange(sum(lengths))
        documents = np.split(stream, np.cumsum(lengths)[:-1])
        stored = write_shards(tmp_path_factory.mktemp("shards"), documents, shard_tokens)
        assert np.array_equal(stream_of(stored), stream)
        start, stop = min(place, len(stream)), min(place + length, len(stream))
        assert np.array_equal(stored.read(start, stop), stream[start:stop])
        with pytest.raises(IndexError):
            stored.read(start, len(stream) + 1)

    def test_few_maps_are_open_at_a_time(self, numbered, monkeypatch):
        monkeypatch.setattr(data_module, "MAX_OPEN_SHARDS", 3)
        stored = TokenShards.open(numbered.folder)
        for start in np.random.default_rng(0).permutation(90):
            assert stored.read(start, start + 13).tolist() == list(range(start, start + 13))
            assert len(stored._maps) <= 3


class TestCache:
    def test_text_is_tokenised_once(self, data_folder, tokenizer, tmp_path, monkeypatch):
        first = shards_of(data_folder, tokenizer, tmp_path)
        monkeypatch.setattr(data_module, "encode_documents", None)  # not needed again
        second = shards_of(data_folder, tokenizer, tmp_path)
        assert (first.folder, first.sha256) == (second.folder, second.sha256)

    def test_it_lies_beside_the_text(self, tokenizer, tmp_path):
        write_text(tmp_path / "data", 0)
        stored = shards_of(tmp_path / "data", tokenizer)
        assert stored.folder.parent == tmp_path / "data" / ".tokens"
        assert shards_of(tmp_path / "data" / "train_0.txt", tokenizer).folder == stored.folder
        (tmp_path / "data").rename(tmp_path / "moved")
        assert shards_of(tmp_path / "moved", tokenizer).folder == tmp_path / "moved" / ".tokens" / stored.folder.name

    def test_a_hub_dataset_has_its_cache_in_hf_home(self, monkeypatch, tmp_path):
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path))
        assert DataSource.parse("hf:a/b").default_cache() == tmp_path / "tide-tokens"

    def test_more_text_is_another_stream(self, tokenizer, tmp_path):
        first = shards_of(write_text(tmp_path, 0), tokenizer)
        second = shards_of(write_text(tmp_path, 1), tokenizer)
        assert first.sha256 != second.sha256
        assert second.num_tokens > first.num_tokens

    def test_the_stream_is_named_by_its_tokens_alone(self, tokenizer, tmp_path):
        one = write_text(tmp_path / "one", 0)
        (tmp_path / "two").mkdir()
        for number, document in enumerate(toy_documents(20, 0)):
            (tmp_path / "two" / f"{number:02d}.txt").write_text(document + "\n")
        assert shards_of(one, tokenizer).sha256 == shards_of(tmp_path / "two", tokenizer).sha256

    @pytest.mark.parametrize(
        "damage",
        [
            lambda f: (f / "index.json").write_text('{"version": '),
            lambda f: (f / "index.json").write_text('{"version": 1}'),
            lambda f: (f / "index.json").write_bytes(b"\xff\xfe"),
            lambda f: (f / "index.json").write_text('{"version": 0, "vocab_size": 320, "shards": []}'),
            lambda f: (f / "counts.safetensors").write_bytes(b"short"),
            lambda f: (f / "counts.safetensors").unlink(),
            lambda f: (f / "shard-00001.uint16").unlink(),
            lambda f: os.truncate(f / "shard-00000.uint16", 5),
        ],
    )
    def test_a_damaged_cache_is_refused_by_open_and_made_anew_by_tokenize(self, tokenizer, tmp_path, damage):
        write_text(tmp_path, 0, 1)
        folder = shards_of(tmp_path, tokenizer, shard_tokens=SHARD).folder
        whole = files_in(folder)
        damage(folder)
        with pytest.raises(UserError, match=r"token cache .* delete it"):
            TokenShards.open(folder)
        shards_of(tmp_path, tokenizer, shard_tokens=SHARD)
        assert files_in(folder) == whole

    def test_processes_that_tokenise_at_the_same_moment(self, data_folder, tokenizer, tmp_path, shards):
        def work(_):
            return shards_of(data_folder, tokenizer, tmp_path, shard_tokens=SHARD)

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(4)))
        assert {result.sha256 for result in results} == {shards.sha256}
        assert files_in(results[0].folder) == files_in(shards.folder)


class TestInterruption:
    @staticmethod
    def fail_at(monkeypatch, number, error):
        """Lets the write of file `number`, from 0, fail; returns the names of those written before."""
        original, written = data_module.write_file, []

        def write_file(path, content):
            if len(written) == number:
                raise error
            original(path, content)
            written.append(path.name)

        monkeypatch.setattr(data_module, "write_file", write_file)
        return written

    @pytest.mark.parametrize("number", range(9))  # 3 shards and their progress, the last shard, counts, index
    def test_a_kill_and_a_resumption_end_with_the_same_bytes(
        self, text, tokenizer, tmp_path, whole, monkeypatch, number
    ):
        with monkeypatch.context() as patch:
            written = self.fail_at(patch, number, Killed())
            with pytest.raises(Killed):
                shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD)
        assert len(written) == number
        with monkeypatch.context() as patch:
            again = self.fail_at(patch, -1, None)
            shards = shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD)
        assert files_in(shards.folder) == whole
        kept = {name for i, name in enumerate(written) if "shard" in name and "progress.safetensors" in written[i:]}
        assert kept.isdisjoint(again)

    def test_many_kills(self, text, tokenizer, tmp_path, whole, monkeypatch):
        for _ in range(3):
            with monkeypatch.context() as patch:
                self.fail_at(patch, 2, Killed())
                with pytest.raises(Killed):
                    shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD)
        assert files_in(shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD).folder) == whole

    @pytest.mark.parametrize("name", ["progress.safetensors", "shard-00000.uint16"])
    def test_damaged_progress_means_to_begin_anew(self, text, tokenizer, tmp_path, whole, monkeypatch, name):
        with monkeypatch.context() as patch:
            self.fail_at(patch, 4, Killed())
            with pytest.raises(Killed):
                shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD)
        (folder,) = tmp_path.iterdir()
        os.truncate(folder / name, 7)
        assert files_in(shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD).folder) == whole

    @given(
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9),
        shard_tokens=st.integers(1, 9),
        cut=st.integers(0, 9),
    )
    @settings(max_examples=40)
    def test_wherever_documents_and_shards_end(self, tmp_path_factory, lengths, shard_tokens, cut):
        folder = tmp_path_factory.mktemp("shards")
        documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        killed = ShardWriter(folder, "text", 1000, shard_tokens)
        for ids in documents[:cut]:
            killed.add(ids)
        stored = write_shards(folder, documents, shard_tokens)
        assert stream_of(stored).tolist() == list(range(sum(lengths)))
        assert stored.counts[: sum(lengths)].tolist() == [1] * sum(lengths)

    def test_max_tokens_that_were_reached_before_the_kill(self, text, tokenizer, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            self.fail_at(patch, 4, Killed())
            with pytest.raises(Killed):
                shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD, max_tokens=2 * SHARD)
        assert shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD, max_tokens=2 * SHARD).num_tokens == 2 * SHARD

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk(self, text, tokenizer, tmp_path, whole, monkeypatch, code):
        calls = []

        def fsync(file):
            calls.append(file)
            if len(calls) > 4:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(UserError, match=r"the disk is full; free space or give --token-cache another place"):
                shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD)
        (folder,) = tmp_path.iterdir()
        names = {file.name for file in folder.iterdir()}
        assert names == {"shard-00000.uint16", "shard-00001.uint16", "progress.safetensors"}
        assert files_in(shards_of(text, tokenizer, tmp_path, shard_tokens=SHARD).folder) == whole


class TestRefusals:
    def test_a_cache_that_cannot_be_written(self, data_folder, tokenizer, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(UserError, match=r"cannot be written \(.*\); give --token-cache another place"):
            shards_of(data_folder, tokenizer, tmp_path / "file")

    def test_a_read_only_cache(self, data_folder, tokenizer, tmp_path, monkeypatch):
        made = shards_of(data_folder, tokenizer, tmp_path)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert shards_of(data_folder, tokenizer, tmp_path).sha256 == made.sha256  # to read it is enough
        with pytest.raises(UserError, match=r"cannot be written \(Permission denied\); give --token-cache"):
            shards_of(data_folder, tokenizer, tmp_path, max_tokens=9)
        assert list(tmp_path.iterdir()) == [made.folder]

    @pytest.mark.parametrize("text", ["", "\n\n\n"])
    def test_no_text(self, tokenizer, tmp_path, text):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(UserError, match="holds no text"):
            shards_of(tmp_path, tokenizer)
        assert list((tmp_path / ".tokens").iterdir()) == []

    def test_text_that_cannot_be_read_leaves_nothing_behind(self, tokenizer, tmp_path):
        (tmp_path / "train_a.txt").write_bytes(b"good text\n\n\xff\xfe bad")
        with pytest.raises(UserError, match=r"train_a\.txt"):
            shards_of(tmp_path, tokenizer)
        assert list((tmp_path / ".tokens").iterdir()) == []

    def test_a_slow_tokenizer(self, data_folder):
        class SlowTokenizer:
            is_fast = False

        with pytest.raises(UserError, match=r"SlowTokenizer\) has no tokenizer\.json"):
            shards_of(data_folder, SlowTokenizer())

    def test_too_little_text(self, numbered):
        with pytest.raises(UserError, match="103 tokens, fewer than one batch of 21 sequences of 5"):
            WindowDataset(numbered, 5, 21, seed=0)

    def test_a_batch_that_does_not_divide(self, numbered):
        with pytest.raises(UserError, match="--batch-size 4 is no multiple of the 3 processes"):
            WindowDataset(numbered, 5, 4, seed=0).batch(0, rank=0, world_size=3)


class TestWindows:
    @given(length=st.integers(2, 12), batch_size=st.integers(1, 5), seed=st.integers(0, 99), step=st.integers(0, 60))
    @settings(max_examples=40)
    def test_the_order_is_the_documented_permutation(self, numbered, length, batch_size, seed, step):
        data = WindowDataset(numbered, length, batch_size, seed)
        assert data.num_windows == 103 // length
        epoch, place = divmod(step, data.num_windows // batch_size)
        order = np.random.default_rng([seed, epoch]).permutation(103 // length)
        windows = order[place * batch_size : (place + 1) * batch_size]
        batch = data.batch(step)
        assert batch.dtype == torch.int64
        assert batch.tolist() == [list(range(w * length, (w + 1) * length)) for w in windows]

    @given(length=st.integers(2, 9), batch_size=st.integers(1, 5), seed=st.integers(0, 99))
    @settings(max_examples=25)
    def test_an_epoch_visits_windows_once_each(self, numbered, length, batch_size, seed):
        data = WindowDataset(numbered, length, batch_size, seed)
        per_epoch = data.num_windows // batch_size
        for epoch in (0, 1):
            rows = torch.cat([data.batch(epoch * per_epoch + i) for i in range(per_epoch)])
            assert rows.shape == (per_epoch * batch_size, length)
            assert len(rows[:, 0].unique()) == len(rows)

    @given(step=st.integers(0, 40), seed=st.integers(0, 9), detour=st.lists(st.integers(0, 40), max_size=4))
    @settings(max_examples=30)
    def test_a_batch_is_a_function_of_tokens_seed_and_step(self, numbered, step, seed, detour):
        wandering = WindowDataset(numbered, 5, 4, seed)
        fresh = WindowDataset(TokenShards.open(numbered.folder), 5, 4, seed)
        for other in detour:
            wandering.batch(other)
        assert torch.equal(wandering.batch(step), fresh.batch(step))

    @given(step=st.integers(0, 40), world_size=st.sampled_from([1, 2, 3, 6]))
    @settings(max_examples=30)
    def test_processes_share_a_batch_without_overlap(self, numbered, step, world_size):
        data = WindowDataset(numbered, 5, 6, seed=1)
        parts = [data.batch(step, rank, world_size) for rank in range(world_size)]
        assert all(part.shape == (6 // world_size, 5) for part in parts)
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), data.batch(step))  # rows rank::world_size

    def test_epochs_and_seeds_have_their_own_order(self, numbered):
        data, other = WindowDataset(numbered, 5, 4, seed=0), WindowDataset(numbered, 5, 4, seed=1)
        assert not torch.equal(data.batch(0), data.batch(data.num_windows // 4))
        assert not torch.equal(data.batch(0), other.batch(0))
