"""An export: every table whole and said what it is, vectors as the projector reads them, nothing of others lost."""

import csv
import json
import math
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from werkzeug.test import Client

from precompute import Artifacts
from precompute.__main__ import main
from precompute.export import check_export_folder, export, folder, frames, projector
from precompute.export.folder import write_parquet
from precompute.export.projector import projected_tokens
from precompute.export.tables import TABLES
from precompute.pipeline import run
from precompute.stages import STAGES
from precompute.tables import CheckpointTables, table_name
from tide.cli import UserError
from tide.config import TideConfig


@pytest.fixture(scope="session")
def tables(job):
    return CheckpointTables(job.checkpoint, TideConfig.from_pretrained(job.checkpoint))


@pytest.fixture(scope="session")
def exported(artifacts, tables, tmp_path_factory):
    """An export of everything; read only."""
    out = tmp_path_factory.mktemp("export") / "out"
    export(artifacts, tables, out, list(STAGES), show_progress=False)
    return out


def read(exported, name):
    return pd.read_parquet(exported / f"{name}.parquet")


def test_every_table_of_every_stage_that_was_made_is_there(exported, artifacts):
    expected = {name for name, table in TABLES.items() if artifacts.has(table.stage)}
    assert len(expected) > 20
    assert {file.stem for file in exported.glob("*.parquet")} == expected
    assert {table.stage for table in TABLES.values()} == set(STAGES)


def test_what_every_column_means_is_said_and_the_readme_names_it(exported):
    described = json.loads((exported / "columns.json").read_text())["tables"]
    readme = (exported / "README.md").read_text()
    assert len(described) == len(list(exported.glob("*.parquet")))
    for name, table in described.items():
        schema = parquet.read_schema(exported / f"{name}.parquet")
        assert list(table["columns"]) == schema.names
        assert all(table["columns"].values())
        assert f"## {name}\n" in readme
        assert table["rows"] == parquet.read_metadata(exported / f"{name}.parquet").num_rows
        assert not {"null", "binary"} & {str(kind) for kind in schema.types if table["rows"]}


def test_a_csv_file_holds_what_the_parquet_file_does(exported):
    for file in exported.glob("*.csv"):
        whole = pd.read_parquet(file.with_suffix(".parquet"))
        back = pd.read_csv(file, keep_default_na=False, na_values=[""])
        assert back.columns.tolist() == whole.columns.tolist()
        for column in whole:
            if pd.api.types.is_numeric_dtype(whole[column]):
                np.testing.assert_allclose(back[column].astype(float), whole[column].astype(float), rtol=1e-6)
            else:
                assert back[column].fillna("").tolist() == whole[column].tolist()


def test_routing_by_token_is_what_the_reader_says(exported, artifacts):
    rows = read(exported, "routing_by_token")
    n = artifacts.tensors("routing").get_tensor("n")
    assert sorted(rows["token_id"].unique()) == np.flatnonzero(n > 0).tolist()
    for token_id, of_token in rows.groupby("token_id"):
        mean, sd, n_token = artifacts.routing(token_id)
        shape = mean.shape
        assert of_token[["layer", "bank"]].to_numpy().tolist() == [list(place) for place in np.ndindex(shape)]
        np.testing.assert_array_equal(of_token["mean"].to_numpy().reshape(shape), mean)
        np.testing.assert_array_equal(of_token["sd"].to_numpy().reshape(shape), sd)
        assert set(of_token["n"]) == {n_token}


def test_neighbours_and_contexts_are_what_the_reader_says(exported, artifacts):
    rows, rng = read(exported, "neighbors"), np.random.default_rng(0)
    for token_id in rng.integers(artifacts.vocab_size, size=5).tolist():
        for table in artifacts.tables:
            ids, cosines = artifacts.neighbors(token_id, table, k=7)
            here = rows[(rows["token_id"] == token_id) & (rows["table"] == table_name(table)) & (rows["rank"] <= 7)]
            assert here.sort_values("rank")["neighbor_id"].tolist() == ids.tolist()
            np.testing.assert_array_equal(here.sort_values("rank")["cosine"], cosines)
    overlaps = read(exported, "overlap").set_index(["token_id", "table"])["jaccard"]
    for token_id in (0, 17):
        assert overlaps.loc[token_id].iloc[-artifacts.num_banks :].tolist() == artifacts.overlap(token_id).tolist()
    contexts = read(exported, "null_contexts")
    for token_id in contexts["token_id"].unique()[:5].tolist():
        for layer in (0, None):
            answer = artifacts.null_contexts(token_id, layer)
            here = contexts[
                (contexts["token_id"] == token_id) & (contexts["layer"] == (-1 if layer is None else layer))
            ]
            assert here["position"].tolist() == answer["position"].tolist()
            np.testing.assert_allclose(here["null_weight"], answer["null_weight"])


def test_the_text_is_the_whole_stream(exported, artifacts):
    rows = read(exported, "text")
    assert rows["token_id"].tolist() == artifacts.tensors("text", "tokens").get_tensor("tokens").tolist()
    assert rows["position"].tolist() == list(range(len(rows)))
    assert rows["domain"][len(rows) - 1] == artifacts.domain_of(len(rows) - 1)


def test_parts_make_the_same_tables_and_are_row_groups_of_their_own(exported, artifacts, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "PART_ROWS", 500)
    export(artifacts, tables, tmp_path / "out", list(STAGES), show_progress=False)
    groups = 0
    for file in exported.glob("*.parquet"):
        other = tmp_path / "out" / file.name
        groups = max(groups, parquet.read_metadata(other).num_row_groups)
        pd.testing.assert_frame_equal(pd.read_parquet(file), pd.read_parquet(other))
        assert parquet.read_schema(file).equals(parquet.read_schema(other))
    assert groups > 50


@given(st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=5))
def test_frames_follow_one_another_in_a_parquet_file(tmp_path_factory, numbers):
    file = tmp_path_factory.mktemp("parquet") / "table.parquet"
    made = [pd.DataFrame({"a": np.array(part, dtype=np.int16), "b": [str(x) for x in part]}) for part in numbers]
    for frame in made:
        frame["b"] = frame["b"].astype("str")
    assert write_parquet(file, iter(made)) == sum(map(len, numbers))
    assert pd.read_parquet(file)["a"].tolist() == [x for part in numbers for x in part]
    assert str(parquet.read_schema(file).field("a").type) == "int16"


def test_a_large_table_is_parquet_only(artifacts, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "CSV_ROWS", 400)
    export(artifacts, tables, tmp_path / "out", ["frequency", "text"], show_progress=False)
    rows = {name: len(read(tmp_path / "out", name)) for name in ("tokens", "text")}
    assert rows["tokens"] < 400 < rows["text"]
    assert {file.name for file in (tmp_path / "out").glob("*.csv")} == {"tokens.csv"}


def test_the_tables_of_a_base_model_lack_the_banks(job, tmp_path):
    alone = replace(job, checkpoint=job.base, base=None, out=tmp_path / "artifacts")
    chosen = ["routing", "overlap", "geometry", "collapse"]
    run(alone, chosen)
    vectors = CheckpointTables(alone.checkpoint, TideConfig.from_pretrained(alone.checkpoint))
    written = export(Artifacts.open(alone.out), vectors, tmp_path / "out", list(STAGES), show_progress=False)
    assert set(read(tmp_path / "out", "routing_by_token")["bank"]) == {0}  # null
    assert read(tmp_path / "out", "mean_injection").empty
    assert {"neighbors", "overlap", "spectrum", "collapse", "projector"} <= set(written)
    assert "top_contexts" not in written


# --- The projector -----------------------------------------------------------------------------------------------


def parse_vectors(file):
    """As the standalone projector does: lines trimmed, blank ones skipped, a first cell no number is a label."""
    rows = [line.strip().split("\t") for line in file.read_text().split("\n") if line.strip()]
    assert all(not math.isnan(float(row[0])) for row in rows)
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) > 1
    return np.array(rows, dtype=np.float32)


def parse_metadata(file):
    """Likewise: the first line is a header where it holds a tab."""
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    assert "\t" in lines[0]
    header, *rows = (line.split("\t") for line in lines)
    assert all(len(row) == len(header) for row in rows)
    return pd.DataFrame(rows, columns=header)


def test_the_standalone_projector_reads_vectors_and_metadata_of_the_same_tokens(exported, artifacts, tables):
    config = json.loads((exported / "projector" / "projector_config.json").read_text())
    assert [entry["tensorName"] for entry in config["embeddings"]] == list(map(table_name, tables.names))
    for entry, table in zip(config["embeddings"], tables.names, strict=True):
        vectors = parse_vectors(exported / "projector" / entry["tensorPath"])
        metadata = parse_metadata(exported / "projector" / entry["metadataPath"])
        assert list(vectors.shape) == entry["tensorShape"]
        assert len(metadata) == len(vectors) == artifacts.vocab_size
        token_ids = metadata["id"].astype(int).to_numpy()
        whole = tables.read(table, 0, artifacts.vocab_size)
        np.testing.assert_array_equal(vectors, whole[token_ids])  # the very same float32
    assert metadata["token"].tolist() == [artifacts.shown[i] for i in token_ids]
    assert metadata["count"].astype(int).tolist() == artifacts.counts[token_ids].tolist()
    assert metadata["decile"].astype(int).tolist() == artifacts.bins[token_ids].tolist()


def test_tensorboard_finds_every_table_in_the_folder(exported, artifacts, tables):
    text = (exported / "projector" / "projector_config.pbtxt").read_text()
    written = text_format.Parse(text, ProjectorConfig())
    data = Mock(list_runs=lambda *_, **__: [])
    plugin = ProjectorPlugin(TBContext(logdir=str(exported / "projector"), data_provider=data))
    server = Client(plugin.get_plugin_apps()["/info"])
    found = json.loads(server.get("/?run=.").data)["embeddings"]
    assert [entry["tensorName"] for entry in found] == [entry.tensor_name for entry in written.embeddings]
    assert [entry["tensorName"] for entry in found] == list(map(table_name, tables.names))
    served = Client(plugin.get_plugin_apps()["/tensor"]).get("/?run=.&name=bank_1").data
    vectors = np.frombuffer(served, dtype=np.float32).reshape(found[0]["tensorShape"])
    metadata = Client(plugin.get_plugin_apps()["/metadata"]).get("/?run=.&name=bank_1&num_rows=100000").data
    rows = metadata.decode().splitlines()
    assert len(rows) - 1 == len(vectors) == artifacts.vocab_size
    np.testing.assert_array_equal(vectors, tables.read(1, 0, artifacts.vocab_size))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_the_projector_gets_the_most_frequent_tokens(counts, most):
    chosen = projected_tokens(np.array(counts), most).tolist()
    ranked = sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:most]
    assert chosen == sorted(ranked)


def test_a_vocabulary_larger_than_the_projector_takes_is_cut(artifacts, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(projector, "TILE_ROWS", 50)
    tokens = artifacts.frame("frequency", "tokens")
    tokens.loc[7, "shown"] = "[a\tb\nc]"  # the name of a special token may be anything
    monkeypatch.setattr(projector, "projected_tokens", lambda counts: np.array([7, 60, 61, 320]))
    projector.write_projector(tmp_path, tables, tokens)
    np.testing.assert_array_equal(parse_vectors(tmp_path / "bank_1.tsv"), tables.read(1, 0, 330)[[7, 60, 61, 320]])
    metadata = parse_metadata(tmp_path / "metadata.tsv")
    assert metadata["id"].tolist() == ["7", "60", "61", "320"]
    assert metadata["token"][0] == "[a⇥b⏎c]"


# --- The folder --------------------------------------------------------------------------------------------------


def test_only_the_stages_asked_for_are_written(artifacts, tables, tmp_path):
    assert set(export(artifacts, tables, tmp_path / "out", ["collapse"], show_progress=False)) == {
        "collapse",
        "collapse_pairs",
        "collapse_probe",
    }
    assert not (tmp_path / "out" / "projector").exists()


def test_an_export_is_replaced_and_another_folder_is_not(artifacts, tables, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export(artifacts, tables, out, ["collapse"], show_progress=False)  # an empty folder may be there
    export(artifacts, tables, out, ["frequency"], show_progress=False)
    assert not (out / "collapse.parquet").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    for spoil in ((tmp_path / "other" / "precious.txt"), (tmp_path / "export of another" / "columns.json")):
        spoil.parent.mkdir()
        spoil.write_text("{}")
        with pytest.raises(UserError, match="holds something else than an export; give a folder that is new or empty"):
            export(artifacts, tables, spoil.parent, ["frequency"], show_progress=False)
        assert spoil.read_text() == "{}"
    with pytest.raises(UserError, match="is a file; give a folder"):
        check_export_folder(spoil)


def test_an_export_that_fails_leaves_the_one_before_and_nothing_else(artifacts, tables, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(artifacts, tables, out, ["frequency"], show_progress=False)
    before = sorted(out.rglob("*"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_projector", full)
    with pytest.raises(UserError, match=r"cannot be written .*No space left.*; make room"):
        export(artifacts, tables, out, ["frequency"], show_progress=False)
    assert sorted(out.rglob("*")) == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_command_exports_what_it_has_made(job, artifact_folder, tmp_path, capsys):
    copy = shutil.copytree(artifact_folder.parent, tmp_path / "own")
    arguments = [copy / "tide", "--text", copy / "text.txt", "--out", copy / "artifacts", "--only", "frequency"]
    command = [*map(str, arguments), "--export", str(tmp_path / "out")]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'out'}: tokens, projector"
    with (tmp_path / "out" / "tokens.csv").open(newline="", encoding="utf-8") as stream:
        assert [row["shown"] for row in csv.DictReader(stream)] == Artifacts.open(artifact_folder).shown
    with pytest.raises(UserError, match="something else"):
        main([*command[:-1], str(copy / "tide")])
