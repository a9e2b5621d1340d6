"""Tasks of lm-eval on a tiny model, against log-likelihoods that are computed here."""

import json

import numpy as np
import pytest
import torch

from tide.cli import UserError, run_command

pytest.importorskip("lm_eval")

from tide.evaluation import tasks
from tide.evaluation.__main__ import main
from tide.evaluation.report import read_report
from tide.evaluation.tasks import TideLM, load_tasks, score_tasks, task_table

QUESTIONS = [
    ("The red fox", ["counts the stars", "paints a door", "xyzzy"], 0),
    ("A small child", ["zq zq", "sings about rain at night"], 1),
    ("My neighbour", ["behind the mill", "near the river."], 0),
    ("The old captain", ["watches three boats", "and", "12"], 2),
    ("In the harbour. " * 30, ["the stars", "a door"], 1),  # longer than the model's context
]
CHOICE = """task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/choice.jsonl}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
LAST_WORD = """task: toy_last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/last_word.jsonl}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
# The first is also a question with its answer, split at another place.
LAST_WORDS = ["The red fox counts the stars", "A small child paints a door", "My neighbour sings about rain"]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    choice = [{"question": q, "choices": c, "label": label} for q, c, label in QUESTIONS]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choice))
    (folder / "last_word.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in LAST_WORDS))
    for name, text in (("choice", CHOICE), ("last_word", LAST_WORD)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def toy_tasks(task_folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        return load_tasks(["toy_choice", "toy_last_word"], task_folder)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    """lm-eval lists the installed packages in every result, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def log_likelihood(model, tokenizer, context, continuation):
    """log p(continuation | BOS context), by hand: (sum, whether greedy decoding would write it)."""
    whole, given = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
    assert whole[0] == given[0] == tokenizer.bos_token_id
    assert whole[: len(given)] == given
    n = len(whole) - len(given)
    whole = whole[-(model.config.max_position_embeddings + 1) :]
    with torch.no_grad():
        log_probs = model(torch.tensor([whole[:-1]])).logits[0, -n:].double().log_softmax(-1)
    target = torch.tensor(whole[-n:])
    return log_probs.gather(-1, target[:, None]).sum().item(), bool((log_probs.argmax(-1) == target).all())


@pytest.mark.parametrize("num_banks", [0, 3])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_those_of_the_log_likelihoods(make_model, tokenizer, toy_tasks, num_banks, batch_size):
    model = make_model(vocab_size=320, num_memory_blocks=num_banks)
    scores = score_tasks(model, tokenizer, toy_tasks, batch_size, replicates=20)
    values = {(row["task"], row["metric"]): row["value"] for row in scores.rows}

    acc, acc_norm = [], []
    for question, choices, label in QUESTIONS:
        likelihoods = np.array([log_likelihood(model, tokenizer, question, " " + c)[0] for c in choices])
        acc.append(likelihoods.argmax() == label)
        acc_norm.append((likelihoods / [len(c) for c in choices]).argmax() == label)
    assert values["toy_choice", "acc"] == np.mean(acc)
    assert values["toy_choice", "acc_norm"] == np.mean(acc_norm)
    np.testing.assert_array_equal(scores.documents["toy_choice", "acc"], acc)

    words = [text.rsplit(" ", 1) for text in LAST_WORDS]
    sums, greedy = zip(*(log_likelihood(model, tokenizer, a, " " + b) for a, b in words), strict=True)
    assert values["toy_last_word", "perplexity"] == pytest.approx(np.exp(-np.mean(sums)), rel=1e-4)
    assert values["toy_last_word", "acc"] == np.mean(greedy)


def test_the_same_tasks_serve_one_model_after_another(make_model, tokenizer, toy_tasks):
    first, other = (make_model(seed, vocab_size=320) for seed in (0, 1))
    runs = [score_tasks(model, tokenizer, toy_tasks, 4, replicates=5).rows for model in (first, other, first)]
    assert runs[0] == runs[2] != runs[1]


def test_bfloat16_models_are_scored_in_float32(make_model, tokenizer):
    """Log-probabilities in bfloat16 have steps of 0.03 and more: sums would lie apart by far more than this."""
    lm = TideLM(make_model(vocab_size=320).to(torch.bfloat16), tokenizer, 4)
    request = (("", ""), tokenizer("The red fox")["input_ids"], tokenizer("counts")["input_ids"][1:])
    found = lm._loglikelihood_tokens([request], disable_tqdm=True)[0][0]
    ids = torch.tensor([request[1] + request[2]])
    with torch.no_grad():
        log_probs = lm.model(ids[:, :-1]).logits.float().log_softmax(-1)[0, len(request[1]) - 1 :]
    expected = log_probs.gather(-1, torch.tensor(request[2])[:, None]).sum().item()
    assert found == pytest.approx(expected, abs=1e-4)


def test_whole_texts_are_scored_without_their_bos(make_model, tokenizer):
    from lm_eval.api.instance import Instance

    lm, text = TideLM(make_model(vocab_size=320), tokenizer, 2), "The red fox counts the stars."
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(lm.model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
    for _ in range(2):
        assert lm.loglikelihood_rolling([request], disable_tqdm=True)[0] == pytest.approx(-loss.item(), rel=1e-4)


def test_gains_are_paired_by_document(make_model, tokenizer, toy_tasks):
    scores = {
        name: score_tasks(make_model(seed, vocab_size=320), tokenizer, toy_tasks, 4, replicates=5)
        for seed, name in enumerate(["base", "tide"])
    }
    table = task_table(scores, "base").set_index(["model", "task", "metric"]).sort_index()
    assert table.loc["base", "gain"].isna().all()
    difference = scores["tide"].documents["toy_choice", "acc"] - scores["base"].documents["toy_choice", "acc"]
    row = table.loc[("tide", "toy_choice", "acc")]
    assert (row["n"], row["gain"]) == (5, pytest.approx(difference.mean()))
    assert row["gain_stderr"] == pytest.approx(difference.std(ddof=1) / 5**0.5)
    assert np.isnan(table.loc[("tide", "toy_last_word", "perplexity"), "gain"])
    average = table.loc[("tide", "average", "acc")]
    both = table.loc[[("tide", "toy_choice", "acc"), ("tide", "toy_last_word", "acc")]]
    assert average["value"] == pytest.approx(both["value"].mean())
    assert average["stderr"] == pytest.approx(np.hypot(*both["stderr"]) / 2)


def test_limit_takes_the_first_documents(make_model, tokenizer, toy_tasks):
    scores = score_tasks(make_model(vocab_size=320), tokenizer, toy_tasks, 4, limit=2, replicates=5)
    assert {row["n"] for row in scores.rows} == {2}


def test_unknown_tasks_and_missing_data_are_one_sentence(task_folder, tmp_path, monkeypatch):
    (tmp_path / "t.yaml").write_text(CHOICE.format(folder=tmp_path / "missing"))
    with pytest.raises(UserError, match="--tasks toy_choice cannot be loaded"):
        load_tasks(["toy_choice"], tmp_path)
    with pytest.raises(UserError, match="nowhere is no folder"):
        load_tasks(["toy_choice"], tmp_path / "nowhere")
    only_ours = tasks.TaskManager(include_path=str(task_folder), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: only_ours)  # lm-eval's own take ten seconds to list
    with pytest.raises(UserError, match="no such task; did you mean toy_choice"):
        load_tasks(["toy_choise"], task_folder)


def test_the_command_prints_and_saves_scores(make_model, tokenizer, task_folder, tmp_path, capfd):
    for name, num_banks in (("base", 0), ("tide", 2)):
        make_model(vocab_size=320, num_memory_blocks=num_banks).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    arguments = [tmp_path / "tide", "--base", tmp_path / "base", "--tasks", "toy_choice", "--task-folder", task_folder,
                 "--limit", "4", "--out", tmp_path / "out", "--device", "cpu"]  # fmt: skip
    capfd.readouterr()
    assert run_command(lambda: main([str(a) for a in arguments])) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("Tasks (lm-eval)")
    assert lines[1].split() == "task metric n base (K=0) tide (K=2) tide (K=2) - base".split()
    assert [line.split()[:3] for line in lines[2:]] == [["toy_choice", "acc", "4"], ["toy_choice", "acc_norm", "4"]]
    facts, tables = read_report(tmp_path / "out" / "report.json")
    assert facts["tasks"]["limit"] == 4
    assert list(tables["tasks"]["model"]) == ["base", "base", "tide", "tide"]


def test_the_paper_s_eight_are_known_to_lm_eval():
    import lm_eval.tasks

    folder = next(iter(lm_eval.tasks.__path__))
    known = tasks.TaskManager(
        include_path=[f"{folder}/{name}" for name in "arc hellaswag lambada openbookqa piqa sciq super_glue".split()],
        include_defaults=False,
    )
    assert len(tasks.PAPER_TASKS) == 8
    assert set(tasks.PAPER_TASKS) <= set(known.all_tasks)
