"""A small project as it should be, and what can be wrong with it: each mistake is a change of one or two places."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.headway.mistakes.small_model import small_config

RUN = """\
[run]
name = "mine"

[learner]
model = "model"
steps = 5
rollouts = { environment = "sums", max_tokens = 5 }

[generator]
model = "model"
engine = { max_model_len = 64, kv_cache_gb = 0.5 }

[reward-service]
sandbox = "off"
verifiers = [{ name = "digits", function = "reward:digits" }]

[env-service]
model = "model"
environments = [{ name = "sums", source = "jsonl", chat = false, train_file = "tasks.jsonl" }]
"""
REWARD = """\
from pydantic import BaseModel

from reward_service.verifier import Submission


class Arguments(BaseModel):
    answer: str


def digits(submission: Submission, arguments: Arguments) -> float:
    return float(submission.completion == arguments.answer)
"""
WORLD = """\
class World:
    def __init__(self) -> None:
        self.maze = [][0]

    def reset(self, task, seed): ...

    def step(self, action): ...
"""


def task(**fields: object) -> str:
    """A line of tasks.jsonl."""
    whole = {"prompt": "27+82=", "verifier": "digits", "arguments": {"answer": "109"}} | fields
    return json.dumps({name: value for name, value in whole.items() if value is not None}) + "\n"


@dataclass(frozen=True)
class Mistake:
    """`change` is what is written in place of what in run.toml; `files` are others; `names` must be in what is said."""

    name: str
    change: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def run_file(self) -> str:
        """The run.toml with the mistake in it."""
        text = RUN
        for good, bad in self.change.items():
            assert good in text, good
            text = text.replace(good, bad)
        return text

    def shown(self) -> str:
        """The mistake as it was written, for the reader of the messages."""
        lines = [line for bad in self.change.values() for line in bad.splitlines() if line]
        lines += [
            f"{name}: {text.splitlines()[-1]}" if text else f"{name} is empty" for name, text in self.files.items()
        ]
        lines += [f"{name} is missing" for name in self.lacks]
        lines += [f"{name}={value}" for name, value in self.environment.items()]
        lines += [" ".join(self.words)] if self.words else []
        return "".join(f"    {line}\n" for line in lines)


ENVIRONMENT = '{ name = "sums", source = "jsonl", chat = false, train_file = "tasks.jsonl" }'
VERIFIER = '{ name = "digits", function = "reward:digits" }'
ROLLOUTS = 'rollouts = { environment = "sums", max_tokens = 5 }'
ENGINE = "engine = { max_model_len = 64, kv_cache_gb = 0.5 }"
GOOD = task()


def _tasks(name: str, line: str, *names: str) -> Mistake:
    return Mistake(name, files={"tasks.jsonl": GOOD + "\n" + line}, names=("tasks.jsonl:3", *names))


def _environment(
    name: str, entry: str, *names: str, files: Mapping[str, str] | None = None, model: str = "model"
) -> Mistake:
    change = {ENVIRONMENT: entry} | ({} if model == "model" else {'"model"': f'"{model}"'})
    return Mistake(name, change=change, names=names, files=files or {})


def _template(name: str, text: str | None, *names: str, entry: str = ENVIRONMENT) -> Mistake:
    change = {'name = "mine"': 'name = "mine"\nchat_template = "mine.jinja"', ENVIRONMENT: entry}
    return Mistake(name, change=change, names=names, files={} if text is None else {"mine.jinja": text})


def _of_a_model(name: str, *names: str, **fields: object) -> Mistake:
    """With these fields in the model's config.json."""
    return Mistake(name, files={"model/config.json": small_config(**{"vocab_size": 24} | fields)}, names=names)


OF_TURNS = """\
from dataclasses import replace
from learner.algorithms.presets.grpo import GrpoConfig
def build():
    return replace(GrpoConfig().preset(), name="mine", turn_rewards=True)
"""


def _learner(name: str, line: str, *names: str, files: Mapping[str, str] | None = None) -> Mistake:
    return Mistake(name, change={"steps = 5": line}, names=names, files=files or {})


def _of_a_file(name: str, line: str, *names: str, files: Mapping[str, str] | None = None) -> Mistake:
    return Mistake(name, change={"steps = 5": line, f"{ROLLOUTS}\n": ""}, names=names, files=files or {})


MISTAKES = (
    # The file itself.
    Mistake("an option without its value", words=("--run.name",), names=("needs a value",)),
    Mistake("a bracket is missing", change={"[generator]": "[generator"}, names=("line 9",)),
    Mistake("a table is misspelled", change={"[learner]": "[lerner]"}, names=("did you mean [learner]",)),
    Mistake("a key is misspelled", change={"steps = 5": "stepps = 5"}, names=("stepps", "did you mean steps?")),
    _learner("a key is one of another trainer", 'wandb = "project"', "wandb", "did you mean trackers.wandb?"),
    _learner("a key of TRL", "num_generations = 8", "num_generations", "rollouts.group_size"),
    _learner("a number is a word", 'steps = "many"', "steps: got 'many'", "expected"),
    _learner("a number is out of range", "max_lag = -1", "max_lag: got -1", "greater than or equal to 0"),
    _learner("no such algorithm", 'algo = "grop"', "algo", "grpo"),
    _learner(
        "an option of another algorithm",
        'algo = { type = "rloo", clip_high = 0.2 }',
        "algo.clip_high is set but has no effect",
    ),
    Mistake("an unknown key in an entry", change={"train_file =": "trainfile ="}, names=("trainfile", "train_file")),
    Mistake(
        "a setting of the command line", words=("--learner.max-lagg", "3"), names=("did you mean --learner.max-lag",)
    ),
    Mistake(
        "a setting that there is not", words=("--learner.flavour", "x"), names=("unknown flag --learner.flavour; see",)
    ),
    Mistake(
        "a variable of the environment", environment={"HEADWAY_LEARNER__STEPP": "3"}, names=("HEADWAY_LEARNER__STEPS",)
    ),
    Mistake("a file without a table", change={RUN: ""}, names=("[learner]",)),
    Mistake(
        "a table with an underscore", change={"[reward-service]": "[reward_service]"}, names=("[reward-service]?",)
    ),
    Mistake("a key before the first table", change={"[run]": "steps = 5\n\n[run]"}, names=("steps", "table")),
    _learner("a key twice", "steps = 5\nsteps = 6", "line 7", "steps = 6"),
    Mistake(
        "a list of tables in the singular", change={"environments = [": "environment = ["}, names=("environments",)
    ),
    _learner("a setting of a group outside of it", "group_size = 8", "group_size", "rollouts.group_size"),
    Mistake("a truth value that is none", change={"chat = false": 'chat = "never"'}, names=("chat", "true or false")),
    Mistake("a setting without its process", words=("--steps", "9"), names=("--learner.steps",)),
    _learner("no step at all", "steps = 0", "steps: got 0"),
    Mistake(
        "a limit on sampling in training",
        change={"max_tokens = 5": "max_tokens = 5, top_p = 0.9"},
        names=("top_p", "evaluation.top_p"),
    ),
    Mistake(
        "a type of vLLM's in other words",
        change={"engine = { ": 'engine = { dtype = "fp16", '},
        names=("engine.dtype: got 'fp16'", "float16"),
    ),
    # The model.
    Mistake("the model is not there", change={'"model"': '"nowhere"'}, names=("nowhere is not a folder",)),
    Mistake("the model has no weights", lacks=("model/model.safetensors",), names=("lacks model.safetensors",)),
    Mistake(
        "weights in another format",
        lacks=("model/model.safetensors",),
        files={"model/pytorch_model.bin": "weights"},
        names=("pytorch_model.bin", "safetensors"),
    ),
    Mistake(
        "an adapter in place of a model",
        lacks=("model/config.json",),
        files={"model/adapter_config.json": "{}"},
        names=("adapter", "headway export"),
    ),
    Mistake(
        "a model on the hub that was not fetched",
        change={'"model"': '"Qwen/Qwen2.5-0.5B-Instruct"'},
        names=("headway fetch Qwen/Qwen2.5-0.5B-Instruct",),
    ),
    Mistake("the model has no tokenizer", lacks=("model/tokenizer.json",), names=("tokenizer",)),
    Mistake(
        "two models",
        change={'[env-service]\nmodel = "model"': '[env-service]\nmodel = "chat-model"'},
        names=("differ",),
    ),
    _environment(
        "a model without a chat template",
        ENVIRONMENT.replace("chat = false, ", ""),
        "chat = false",
        "of source jsonl",
        "sums",
    ),
    # A chat template in a file.
    _template("the chat template is not there", None, "mine.jinja is not a file"),
    _template("the chat template is no Jinja", "{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2"),
    _template(
        "the chat template knows no users", "\n{{ raise_exception('only tools may speak') }}", "line 2", "only tools"
    ),
    _template("the chat template loses messages", "{{ messages | length }}", "mine.jinja loses the user's message"),
    Mistake(
        "the run tells the chat template what it does not read",
        change={
            'name = "mine"': 'name = "mine"\nchat_template = "mine.jinja"\nchat_template_kwargs = { thinking = true }'
        },
        files={"mine.jinja": "{% if enable_thinking %}think {% endif %}{{ messages[0].content }}"},
        names=("[run] chat_template_kwargs", "mine.jinja does not read thinking", "it reads enable_thinking"),
    ),
    _template(
        "an environment that tells the chat template what it does not read",
        "{{ messages[0].content }}",
        "environment sums: chat_template_kwargs",
        "mine.jinja does not read enable_thinking; it reads no arguments",
        entry=ENVIRONMENT.replace("chat = false", "chat_template_kwargs = { enable_thinking = true }"),
    ),
    _template(
        "an environment whose role the chat template cannot carry",
        "{{ messages[0].content }}",
        "environment sums",
        "mine.jinja cannot carry role tool",
        entry='{ name = "sums", source = "arithmetic" }',
    ),
    _environment(
        "an opponent whose model is not there",
        '{ name = "sums", source = "nim_duel", opponent = { urls = ["http://127.0.0.1:7410"], model = "nowhere" } }',
        "nowhere/tokenizer.json",
        model="chat-model",
    ),
    # Sizes.
    Mistake(
        "longer than the model has positions",
        change={"max_model_len = 64": "max_model_len = 4096"},
        names=("engine.max_model_len is 4096", "128"),
    ),
    Mistake(
        "a model whose weights are quantized",
        files={"model/hf_quant_config.json": '{"quantization": {"quant_algo": "NVFP4"}}'},
        names=("[generator]", "[learner]", "NVFP4", "dequantize"),
    ),
    Mistake(
        "completions longer than the engine takes",
        change={"max_tokens = 5": "max_tokens = 64"},
        names=("rollouts.max_tokens is 64", "engine.max_model_len is 64"),
    ),
    Mistake(
        "a prompt leaves too little room",
        files={"tasks.jsonl": GOOD + task(prompt="1+" * 40 + "1=")},
        names=("tasks.jsonl:2", "82 tokens", "87"),
    ),
    Mistake(
        "a cache larger than the machine",
        change={"kv_cache_gb = 0.5": "kv_cache_gb = 500"},
        names=("memory", "503.0 GiB", "kv_cache_gb"),
    ),
    # Tasks.
    _environment(
        "the file of tasks is not there", ENVIRONMENT.replace("tasks.jsonl", "task.jsonl"), "task.jsonl", "No such"
    ),
    Mistake("the file of tasks is empty", files={"tasks.jsonl": ""}, names=("tasks.jsonl holds no task",)),
    _tasks("a line is no JSON", '{"prompt": "27+82=",\n', "no JSON object"),
    _tasks("a field of a task is misspelled", task(promt="1+1=", prompt=None), "'promt'", "did you mean prompt?"),
    _tasks("a task without a verifier", task(verifier=None), "verifier"),
    _tasks(
        "a task with two prompts", task(messages=[{"role": "user", "content": "1+1="}]), "messages or prompt, got both"
    ),
    _tasks("a role that there is not", task(prompt=None, messages=[{"role": "human", "content": "1+1="}]), "human"),
    _tasks("a verifier that nobody offers", task(verifier="digit"), "'digit'", "did you mean digits?"),
    _tasks("arguments that the verifier does not take", task(arguments={"anser": "2"}), "anser", "mean answer?"),
    _environment(
        "the file of held-out tasks is broken",
        ENVIRONMENT.replace("train_file", 'evaluation_file = "held_out.jsonl", train_file'),
        "held_out.jsonl:1",
        files={"held_out.jsonl": "prompt;answer\n"},
    ),
    Mistake(
        "a file of tasks that is one list",
        files={"tasks.jsonl": f"[{GOOD.strip()},\n{GOOD.strip()}]\n"},
        names=("tasks.jsonl:1: begins a list",),
    ),
    _tasks("a prompt that is a conversation", task(prompt=[{"role": "user", "content": "1+1="}]), "called messages"),
    _tasks("an argument of another type", task(arguments={"answer": 2}), "answer", "got 2"),
    _environment(
        "a default verifier that nobody offers",
        ENVIRONMENT.replace("chat", 'verifier = "digts", chat'),
        "did you mean digits?",
        files={"tasks.jsonl": task(verifier=None)},
    ),
    # Environments.
    _environment("no such kind of tasks", ENVIRONMENT.replace('"jsonl"', '"json"'), "'json'"),
    Mistake(
        "an environment that nobody offers",
        change={'environment = "sums"': 'environment = "sum"'},
        names=("rollouts.environment is 'sum'", "did you mean sums?"),
    ),
    Mistake(
        "several environments, and none is named",
        change={
            ROLLOUTS: "rollouts = { max_tokens = 5 }",
            ENVIRONMENT: ENVIRONMENT + ', { name = "more", source = "addition" }',
        },
        names=("rollouts.environment is not set", "more, sums"),
    ),
    _environment(
        "a mix of what is not there", '{ name = "all", source = "mix", parts = [{ environment = "sums" }] }', "sums"
    ),
    _environment(
        "a dataset that reasoning-gym has not",
        '{ name = "sums", source = "reasoning_gym", dataset = "basic_arithmetik", chat = false }',
        "did you mean basic_arithmetic?",
    ),
    _environment(
        "two environments of one name",
        f"{ENVIRONMENT}, {ENVIRONMENT}",
        "sums",
    ),
    _environment(
        "a class that is not there", '{ name = "sums", source = "world:Wrld" }', "Wrld", files={"world.py": WORLD}
    ),
    _environment(
        "an environment that cannot be made",
        '{ name = "sums", source = "world:World" }',
        "world.py",
        "line 3",
        files={"world.py": WORLD},
    ),
    _environment(
        "options that an environment does not take", '{ name = "sums", source = "nim", options = { heap = 3 } }', "heap"
    ),
    # Rewards.
    Mistake(
        "the module of a reward is not there",
        change={"reward:digits": "rewards:digits"},
        names=("'rewards'", "PYTHONPATH"),
    ),
    Mistake("the function of a reward is not there", change={"reward:digits": "reward:digit"}, names=("digit",)),
    Mistake(
        "a path of a file in place of a module",
        change={"reward:digits": "reward.py"},
        names=("package.module:function",),
    ),
    Mistake(
        "a reward that cannot be read", files={"reward.py": REWARD + "def more(:\n"}, names=("reward.py", "line 12")
    ),
    Mistake(
        "a reward that fails when it is imported",
        files={"reward.py": REWARD + 'TABLE = open("table.json")\n'},
        names=("reward.py", "line 12", "table.json"),
    ),
    Mistake(
        "a reward with other parameters",
        files={"reward.py": "def digits(text: str) -> float:\n    return 0.0\n"},
        names=("submission",),
    ),
    Mistake(
        "a column that a reward function of TRL's form takes, and the task lacks",
        files={"reward.py": "def digits(completions, solution, **kwargs):\n    return [0.0 for _ in completions]\n"},
        names=("solution", "tasks.jsonl:1"),
    ),
    Mistake("a reward with an included one's name", change={'name = "digits"': 'name = "math"'}, names=("math",)),
    Mistake(
        "a reward model that is not there",
        change={"[env-service]": 'reward_models = [{ name = "taste", path = "nowhere" }]\n\n[env-service]'},
        names=("nowhere",),
    ),
    # Algorithms.
    _learner(
        "an algorithm of one's own that is not there", 'algo = { type = "custom", path = "mine:algo" }', "algo.path"
    ),
    _learner(
        "an algorithm of one's own that returns something else",
        'algo = { type = "custom", path = "algo:build" }',
        "algo:build",
        "Preset",
        files={"algo.py": "def build():\n    return 1\n"},
    ),
    _learner(
        "options that an algorithm of one's own does not take",
        'algo = { type = "custom", path = "algo:build", options = { clipp = 0.2 } }',
        "clipp",
        files={"algo.py": "def build(clip=0.2):\n    return 1\n"},
    ),
    _learner(
        "an algorithm of one's own that needs the rewards of turns, beside masked tokens",
        'algo = { type = "custom", path = "algo:build" }\nlag = { on_lag = "mask" }',
        "the Preset mine of algo custom needs whole trajectories",
        files={"algo.py": OF_TURNS},
    ),
    Mistake(
        "no group could be kept",
        change={"max_tokens = 5": "max_tokens = 5, group_size = 1"},
        names=("min_group_size is 2", "group_size 1"),
    ),
    _learner(
        "sets of answers as large as the group",
        'algo = { type = "pass_at_k", k = 8 }',
        "algo.k is 8 and rollouts.group_size 8",
    ),
    Mistake(
        "priors of tasks in a file that has scores",
        change={ROLLOUTS: ROLLOUTS.replace(" }", ', tasks = { by = "signal", priors = "rates.jsonl" } }')},
        files={"rates.jsonl": '{"task": 0, "score": 0.5}\n'},
        names=("rollouts.tasks.priors", "line 1", "passes", '"trials": 8'),
    ),
    Mistake(
        "demonstrations in a file that is not there",
        change={"steps = 5": 'steps = 5\ndemonstrations = { path = "shown.jsonl" }'},
        names=("demonstrations.path", "shown.jsonl does not exist", "expected a JSONL"),
    ),
    Mistake(
        "observations of an environment that says nothing behind the first turn",
        change={"steps = 5": 'steps = 5\nalgo = { type = "grpo", observation_weight = 0.1 }'},
        names=("observation_weight", "environment sums end with the policy's first turn", "max_turns of 2 or more"),
    ),
    Mistake(
        "priors of tasks where none are drawn",
        change={ROLLOUTS: ROLLOUTS.replace(" }", ', tasks = { priors = "rates.jsonl" } }')},
        names=("rollouts.tasks", 'by = "signal"'),
    ),
    Mistake(
        "greedy answers where none are sampled",
        change={
            "steps = 5": 'steps = 5\nalgo = "remax"',
            ENVIRONMENT: '{ name = "sums", source = "world:World" }',
            '"model"': '"chat-model"',
        },
        files={"world.py": "class World:\n    async def run(self, task, client): ...\n"},
        names=("algo.type is 'remax'", "environment sums is an agent", "such as rloo"),
    ),
    Mistake(
        "a policy that teaches itself without a hint",
        change={"steps = 5": 'steps = 5\nalgo = "opd"\nteachers = [{ name = "self", policy = true }]'},
        names=("teacher self is shown privileged text", "set teacher_hint in its entry"),
    ),
    Mistake(
        "a hint with a sibling in groups of one",
        change={
            "steps = 5": 'steps = 5\nalgo = "opd"\nteachers = [{ name = "self", policy = true }]',
            ROLLOUTS: ROLLOUTS.replace(" }", ", group_size = 1, min_group_size = 1 }"),
            ENVIRONMENT: ENVIRONMENT.replace(" }", ', teacher_hint = "{sibling}" }'),
        },
        names=("group_size is 1", "teacher_hint of environment sums", "expected a group_size of 2 or more"),
    ),
    _of_a_file("an algorithm that wants a file", 'algo = "sft"', "data.path"),
    _of_a_file(
        "a file of examples that is not there", 'algo = "sft"\ndata.path = "sft.jsonl"', "sft.jsonl does not exist"
    ),
    _of_a_file(
        "an example that is none",
        'algo = "sft"\ndata.path = "sft.jsonl"',
        "line 2",
        files={"sft.jsonl": '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+1="}\n'},
    ),
    _of_a_file(
        "a setting of sampling where nothing is sampled",
        'algo = "dpo"\ndata.path = "sft.jsonl"\nmax_lag = 2',
        "max_lag is set but has no effect",
        "algo dpo",
    ),
    _learner("nothing to resume", "resume = true", "resume", "runs/mine"),
    Mistake("a reward in quotes with a dot", change={"reward:digits": "reward.digits"}, names=("reward:digits",)),
    # The model.
    _of_a_model("heads that vLLM's attention on a CPU lacks", "have 16 numbers", "32, 64, 80", head_dim=16),
    _of_a_model("a tokenizer with more ids than the model has rows", "ids up to 23", "20 rows", vocab_size=20),
    Mistake(
        "no end token",
        files={
            "model/config.json": small_config(vocab_size=24, eos_token_id=None),
            "model/tokenizer_config.json": "{}",
        },
        names=("names no end token", "rollouts.stop_token_ids"),
    ),
    _of_a_model(
        "a model of a kind that vLLM lacks",
        "is a LlamaForTomorrow",
        "LlamaForCausalLM",
        architectures=["LlamaForTomorrow"],
    ),
    # The machine.
    Mistake(
        "NCCL without a GPU",
        change={"steps = 5": 'weights.backend = "nccl"', "engine =": 'join.backend = "nccl"\nengine ='},
        names=("nccl", "gloo"),
    ),
    _learner("a GPU that is not there", "devices = [0]", "devices", "0 GPUs"),
    _learner("more ranks than cores", "ranks = 64", "ranks is 64", "2"),
    _learner("ranks that do not share heads evenly", "training.sequence_parallel = 3", "is 3", "4 attention heads"),
    Mistake(
        "workers that do not share evenly",
        change={"kv_cache_gb": "tensor_parallel_size = 3, kv_cache_gb"},
        names=("tensor_parallel_size is 3", "4 attention heads"),
    ),
    Mistake("two processes on one port", change={"engine =": "http.port = 7300\nengine ="}, names=("7300",)),
    Mistake(
        "an address of another process",
        change={'sandbox = "off"': 'sandbox = "off"\nhttp.port = 7321'},
        names=("7320", "7321"),
    ),
    Mistake(
        "open to other machines", change={'sandbox = "off"': 'sandbox = "off"\nhttp.host = "0.0.0.0"'}, names=("token",)
    ),
    Mistake(
        "the folder of runs is a file",
        change={'name = "mine"': 'name = "mine"\ndirectory = "tasks.jsonl"'},
        names=("tasks.jsonl", "run.directory"),
    ),
    Mistake("a name with a slash", change={'name = "mine"': 'name = "my/run"'}, names=("my/run",)),
)
