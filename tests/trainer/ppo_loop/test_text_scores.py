"""PPO against models that read text: a reward model with a tokenizer of its own, and a judge."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.main_ppo import train
from podium.utils.errors import UserError
from tests.copying import save_copying_model

POLICY_CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
MODEL_CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>\n{% endfor %}"
COUNT = "{{ response | select('in', '0123456789') | list | length }}"
"""How many digits there are, as a judge's question that ends with its answer."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def reward_model(task, tmp_path_factory) -> Path:
    """A random reward model over bytes, with an end-of-sequence and a chat template of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["[user] 291417= [assistant] 112479"] * 50,
        trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<end>", "<pad>"]),
    )
    path = tmp_path_factory.mktemp("reward_model")
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    own.chat_template = MODEL_CHAT
    own.save_pretrained(path)
    config = AutoConfig.from_pretrained(task.model)
    config.vocab_size, config.num_labels, config.pad_token_id = len(own), 1, own.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def judge(task, tmp_path_factory) -> Path:
    return save_copying_model(task.model, tmp_path_factory.mktemp("judge"))


def configured(task, run_dir: Path, model: Path, **changes) -> PPOConfig:
    keys = {"reward_model__enable": "true", "reward_model__model__path": model, **changes}
    config, explicit = load_config(PPOConfig, task.ppo(run_dir, **keys))
    check_config(config, explicit)
    return config


def asked(task, run_dir: Path, judge: Path, question: str = COUNT, **changes) -> PPOConfig:
    template = run_dir.parent / "judge.jinja"
    template.write_text(question)
    keys = {
        "style": "generative",
        "rollout__name": "hf",
        "judge__template": template,
        "judge__verdict": "'^(\\d)'",
        "judge__max_prompt_length": 16,
        "judge__max_response_length": 2,
    }
    return configured(task, run_dir, judge, **{f"reward_model__{key}": value for key, value in keys.items()} | changes)


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.mark.parametrize("chat", [False, True])
def test_another_tokenizer_s_scores_are_those_of_transformers(task, reward_model, tmp_path, capsys, chat):
    keys = {"custom_reward_function__path": None, "trainer__val_only": "true", "trainer__log_val_generations": 24}
    questions = [row["prompt"] for row in pq.read_table(task.val).to_pylist()]
    if chat:
        table = pq.read_table(task.val).to_pylist()
        for row in table:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        pq.write_table(pa.Table.from_pylist(table), tmp_path / "val.parquet")
        (tmp_path / "chat.jinja").write_text(POLICY_CHAT)
        files = {"train_files": "val.parquet", "val_files": "val.parquet", "chat_template": "chat.jinja"}
        keys |= {f"data__{key}": tmp_path / name for key, name in files.items()} | {"data__max_prompt_length": 12}
    validation = train(configured(task, tmp_path / "run", reward_model, **keys))
    assert "has a tokenizer of its own: it reads the text" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    own, policy = AutoTokenizer.from_pretrained(reward_model), AutoTokenizer.from_pretrained(task.model)
    samples = rows(tmp_path / "run", "val_samples.jsonl")
    assert len(samples) == 24
    for question, sample in zip(questions, samples, strict=True):
        ids = policy(sample["response"], add_special_tokens=False).input_ids
        answer = policy.decode(ids, skip_special_tokens=True)
        text = f"[user] {question}<end>\n[assistant] {answer}<end>\n" if chat else f"{question}{answer}<end>"
        with torch.no_grad():
            hidden = model.model(input_ids=own(text, return_tensors="pt").input_ids).last_hidden_state[0, -1]
            assert float(model.score(hidden)) == pytest.approx(sample["score"], rel=1e-3, abs=1e-4)
    assert validation["val/failure_rate"] == 0


def test_what_is_too_long_for_the_model_has_no_score(task, reward_model, tmp_path):
    short = tmp_path / "short"
    AutoModelForSequenceClassification.from_pretrained(reward_model, max_position_embeddings=10).save_pretrained(short)
    AutoTokenizer.from_pretrained(reward_model).save_pretrained(short)
    with pytest.raises(UserError, match=r"train.parquet row 0: it has \d+ tokens of the reward model, which takes 10"):
        train(configured(task, tmp_path / "run", short))


def test_a_judge_s_score_is_what_it_answers(task, judge, tmp_path):
    """It counts digits, as the function does that is only reported."""
    config = asked(task, tmp_path / "run", judge, reward_model__function_weight=0, trainer__total_training_steps=2)
    validation = train(config)
    assert validation["val/reward_model/score/mean"] == pytest.approx(6 * validation["val/score/mean"], rel=0.2)
    for row in rows(tmp_path / "run")[1:]:
        assert row["reward_model/failure_rate"] == 0 and row["reward_model/score/std"] > 0
        assert row["critic/score/mean"] == pytest.approx(row["reward_model/score/mean"])
        # The function stops at six digits of seven.
        assert 6 * row["reward/score/mean"] <= row["reward_model/score/mean"] + 1e-6
        assert row["actor/grad_norm"] > 0


def test_a_verdict_without_a_number_leaves_the_response_out(task, judge, tmp_path, capsys):
    odd = "{% if response | length is odd %}no{% else %}" + COUNT + "{% endif %}"
    keys = {"max_failure_rate": 0.99, "function_weight": 1}
    config = asked(task, tmp_path / "run", judge, odd, **{f"reward_model__{key}": v for key, v in keys.items()})
    train(config)
    steps = rows(tmp_path / "run")[1:]
    assert any(0 < step["reward_model/error_rate"] < 1 for step in steps)
    failures = rows(tmp_path / "run", "reward_failures.jsonl")
    assert failures and all(len(failure["solution_str"]) % 2 for failure in failures)
    assert failures[0]["traceback"] == "oo" and failures[0]["prompt"].endswith("=")
    out = capsys.readouterr().out
    assert f"judge {judge}: first error, on sample" in out and "was cut at its length limit and has no match of" in out


def test_a_judge_that_never_gives_a_number_stops_the_run(task, judge, tmp_path):
    with pytest.raises(UserError, match=r"judge .* gave no score for \d+ of 24 .*max_failure_rate=0.25"):
        train(asked(task, tmp_path / "run", judge, "{{ response }}?"))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("{{ answer }}", r"judge.template=.* reads answer; there are prompt, response"),
        ("{{ extra_info.nothing }}", r"train.parquet row 0: reward_model.judge.template=.* fails \(UndefinedError"),
        ("{{ response * 9 }}", r"row 0: the judge is asked in 54 tokens, reward_model.judge.max_prompt_length is 16"),
    ],
)
def test_a_bad_question_is_told_before_any_worker_starts(task, judge, tmp_path, question, message):
    with pytest.raises(UserError, match=message):
        train(asked(task, tmp_path / "run", judge, question))
    assert not (tmp_path / "run").exists()


def test_settings_of_a_judge_without_effect(task, judge, tmp_path):
    with pytest.raises(UserError, match=r"reward_model.strategy has no effect with reward_model.style=generative"):
        asked(task, tmp_path / "run", judge, reward_model__strategy="fsdp")
    with pytest.raises(UserError, match=r"reward_model.rollout.top_k has no effect with .*temperature=0"):
        asked(task, tmp_path / "run", judge, reward_model__rollout__top_k=5)
    with pytest.raises(UserError, match=r"reward_model.judge.max_prompt_length=127 .* has 128 positions"):
        train(asked(task, tmp_path / "run", judge, reward_model__judge__max_prompt_length=127))
