"""The promises of the project as a whole: sizes, recipes, settings, README."""
import ast
import importlib
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import config
import train

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("prepare.py", "train.py", "sample.py", "hellaswag.py")
RECIPES = sorted(p for p in (ROOT / "config").glob("*.py") if p.stem != "__init__")
PARAMETERS = {"fineweb_small": 124_439_808, "fineweb_small_muon": 124_439_808,
              "fineweb_l4": 124_439_808, "fineweb_medium": 354_823_168, "fineweb_large": 774_030_080,
              "fineweb_xl": 1_557_611_200, "finetune_gpt2": 124_439_808, "eval_gpt2": 124_439_808,
              "books": 17_670_400, "quickstart": None}


@pytest.mark.parametrize("script,limit", [("train.py", 450), ("config/__init__.py", 99)])
def test_a_file_stays_short_enough_to_read_in_one_sitting(script, limit):
    lines = (ROOT / script).read_text().splitlines()
    assert len(lines) <= limit and max(map(len, lines)) <= 100


def test_nothing_else_stands_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here")
    top = {name.split("/")[0] for name in listed.stdout.split()}
    assert top <= {*SCRIPTS, "config", "tests", "README.md", "LICENSE", "requirements.txt", ".gitignore",
                   "requirements-dev.txt", "pyproject.toml", ".ci"}


def test_importing_a_script_only_defines_names():
    """No parsing, no device, no process group; and the heavy libraries only where they are used."""
    code = ("import sys; sys.argv = ['x', '--nonsense']; import prepare; "
            "assert not {'torch', 'datasets', 'tiktoken', 'tqdm'} & set(sys.modules), 'prepare'; "
            "import train, sample, hellaswag; import torch; "
            "assert not {'datasets', 'tiktoken', 'transformers'} & set(sys.modules); "
            "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_arrows_point_one_way():
    def imports(script):
        return {alias for node in ast.walk(ast.parse((ROOT / script).read_text()))
                for alias in ([node.module] if isinstance(node, ast.ImportFrom) else
                              [a.name for a in node.names] if isinstance(node, ast.Import) else [])}
    own = {"config", "prepare", "train", "sample", "hellaswag"}
    assert imports("prepare.py") & own == {"config"}
    assert imports("train.py") & own == {"config", "prepare", "hellaswag"}
    assert imports("sample.py") & own <= {"config", "prepare", "train"}
    assert imports("hellaswag.py") & own <= {"config", "prepare", "train"}


# --- settings

def defaults_of(script):
    values = vars(importlib.import_module(script.removesuffix(".py")))
    return {key: values[key] for key in config.settings_of(ROOT / script)}


def test_edits_that_people_make_at_the_top_of_a_script(tmp_path, run):
    """Arithmetic, other settings, what isn't a setting; from one script's top and read by another."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    top = ("import os\nbatch_size = 2**4  # sequences\nlearning_rate = 3e-4  # peak\nmin_lr = learning_rate / 10  # end\n"
           "a, b = 1, 2\nos.environ['X'] = 'y'\nhelper = os.path.join  # not a setting\n"
           "from config import configure\ndef main():\n    print(configure(globals()))\nmain()\n")
    (tmp_path / "train.py").write_text(top)
    (tmp_path / "sample.py").write_text(top)
    done = subprocess.run([sys.executable, "train.py", "--batch_size=3", "--min_lr=1"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.stdout.endswith("{'batch_size': 3, 'learning_rate': 0.0003, 'min_lr': 1.0}\n"), done.stderr


def configure(script, *argv):
    """The settings that a script would run with; script as a name."""
    names = {"__file__": str(ROOT / script), "__doc__": "x"}
    names |= defaults_of(script)
    return config.configure(names, argv)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_drives_all_four_scripts_and_builds_its_model(recipe, capsys):
    for script in SCRIPTS:
        settings = configure(script, str(recipe))
        if "out_dir" in settings:
            assert settings["out_dir"] == f"out/{recipe.stem}"
    s = configure("train.py", str(recipe))
    assert s["total_batch_size"] % (s["batch_size"] * s["block_size"]) == 0
    shape = [s[k] for k in ("n_layer", "n_head", "n_embd", "dropout", "gradient_checkpointing")]
    vocab = 257 if recipe.stem == "quickstart" else 50257
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(s["block_size"], vocab, *shape))
    n = sum(p.numel() for p in model.parameters()) - -vocab % 128 * s["n_embd"]
    assert PARAMETERS[recipe.stem] in (None, n)
    head = recipe.read_text().split("\n\n")[0]
    assert "python prepare.py" in head or "torchrun" in head or "train.py" in head
    assert "utcome" in head and "ime" in head and "ardware" in head or recipe.stem == "eval_gpt2"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_holds_only_what_differs_from_the_defaults(recipe):
    mine, defaults = config.read_recipe(recipe), [defaults_of(script) for script in SCRIPTS]
    same = [key for key, value in mine.items() if all(d[key] == value for d in defaults if key in d)]
    assert not same or recipe.stem == "fineweb_small"  # which spells the defaults out


def test_defaults_are_fineweb_small(capsys):
    recipe = configure("train.py", str(ROOT / "config/fineweb_small.py"))
    assert configure("train.py") == recipe
    assert configure("prepare.py") == configure("prepare.py", str(ROOT / "config/fineweb_small.py"))


@pytest.mark.parametrize("key,text,want", [
    ("learning_rate", "1", 1.0), ("max_iters", "1e3", 1000), ("max_iters", "1_000", 1000),
    ("dropout", "0", 0.0), ("compile", "false", False), ("compile", "TRUE", True),
    ("out_dir", "123", "123"), ("out_dir", "a=b c", "a=b c"), ("weight_decay", "-1", -1.0),
    ("seed", "9007199254740993", 9007199254740993)])
def test_one_type_rule_for_flags_and_files(tmp_path, capsys, key, text, want):
    got = configure("train.py", f"--{key}={text}")[key]
    assert got == want and type(got) is type(want)
    recipe = tmp_path / "r.py"
    recipe.write_text(f"{key} = {want!r}\n_own = 1\nimport math\ndef helper(): pass\n")
    assert configure("train.py", str(recipe))[key] == want


@pytest.mark.parametrize("argv,said", [
    (["--batch_size=4.5"], "batch_size wants int, got '4.5'"), (["--compile=1"], "compile wants bool"),
    (["--dropout=much"], "dropout wants float"), (["--dropout=nan"], "dropout wants float"),
    (["--max_iters=True"], "max_iters wants int"), (["--learing_rate=1"], "did you mean learning_rate"),
    (["--torch=1"], "no setting 'torch'"), (["--max_iters", "5"], "--max_iters=VALUE"),
    (["config/quickstrat.py"], "did you mean config/quickstart.py"), (["-x=1"], "no setting"),
    (["--source=x"], "no setting 'source'")])
def test_a_wrong_setting_is_one_line_that_helps(monkeypatch, capsys, argv, said):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        configure("train.py", *argv)
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("text,said", [
    ("learing_rate = 1e-4", "learning_rate"), ("batch_size = 4.5", "batch_size"), ("out_dir = 3", "out_dir"),
    ("max_iters = True", "max_iters"), ("x = (", "SyntaxError"), ("1 / 0", "ZeroDivisionError"),
    ("compile = 1", "compile"), ("sizes = [1]", "sizes")])
def test_a_wrong_recipe_is_one_line_that_names_the_file(tmp_path, capsys, text, said):
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(SystemExit) as end:
        configure("train.py", str(tmp_path / "r.py"))
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and "r.py" in err and err.count("\n") == 1


def test_later_wins_and_other_scripts_keys_are_passed_over(tmp_path, capsys):
    (tmp_path / "r.py").write_text("max_iters = 5\ntop_k = 7\nsource = 'x'\n")
    assert configure("train.py", "--max_iters=3", str(tmp_path / "r.py"))["max_iters"] == 5
    assert configure("train.py", str(tmp_path / "r.py"), "--max_iters=3")["max_iters"] == 3
    assert configure("sample.py", str(tmp_path / "r.py"))["top_k"] == 7


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_setting(script):
    begun = time.time()
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True,
                          env={**os.environ, "TIKTOKEN_CACHE_DIR": "/nonexistent"})
    assert done.returncode == 0 and (script != "prepare.py" or time.time() - begun < 3)
    for key, meaning in config.settings_of(ROOT / script).items():
        assert key in done.stdout and meaning and meaning in done.stdout


def test_a_key_means_the_same_in_every_script():
    seen = {}
    for script in SCRIPTS:
        for key, default in defaults_of(script).items():
            if key not in ("compile",):
                assert seen.setdefault(key, default) == default, (script, key)


# --- README

def readme_commands():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```|^((?: {4}\S.*\n)+)", text, re.S | re.M)
    lines = "\n".join(a or b for a, b in blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r"\s*(python|torchrun|pip|srun)\b", line)]


def test_readme_opens_with_its_two_commands():
    commands = readme_commands()
    assert commands[0] == ("pip install -r requirements.txt && python prepare.py config/quickstart.py && "
                           "python train.py config/quickstart.py && python sample.py config/quickstart.py")
    assert commands[1] == "pip install -r requirements-dev.txt && python -m pytest"


TINY = ("--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=32", "--batch_size=2",
        "--total_batch_size=128", "--eval_tokens=64", "--compile=False", "--hellaswag_data=rows.jsonl")
SMALLER = {"prepare.py": ("--val_tokens=3000", "--shard_size=20000"), "train.py": TINY,
           "sample.py": ("--max_new_tokens=4", "--num_samples=2"),
           "hellaswag.py": ("--hellaswag_data=rows.jsonl",)}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what the README's commands read: texts, HellaSwag rows, and a tiny model for "gpt2"."""
    import prepare
    import train
    desk = tmp_path_factory.mktemp("desk")
    for folder in ("notes", "my/texts"):
        (desk / folder).mkdir(parents=True)
        for i in range(3):
            (desk / folder / f"{i}.txt").write_text(f"The quick brown fox {i} jumps over it. " * 900)
    (desk / "books").mkdir()
    pq.write_table(pa.table({"text": [f"page {i} " * 900 for i in range(20)]}), desk / "books/a.parquet")
    pq.write_table(pa.table({"body": [f"page {i} " * 900 for i in range(20)]}), desk / "pages.parquet")
    row = dict(ind=1, activity_label="Fishing", ctx_a="A man sits.", ctx_b="he", ctx="A man sits. he", label="2",
               endings=["eats.", "sleeps a lot.", "fishes.", "is a boat."])
    (desk / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    encoding = prepare.load_tokenizer("gpt2")
    (desk / "tokenizer").mkdir()
    prepare.save_tokenizer(encoding, desk / "tokenizer")
    train.save_checkpoint(str(desk / "gpt2"), train.GPT(train.GPTConfig(64, 50257, 1, 1, 16, 0.0, False)),
                          prepare.tokenizer_files(str(desk / "tokenizer"))[2], encoding.eot_token)
    shutil.rmtree(desk / "tokenizer")
    return desk


def in_small(command):
    """The README's command as lists to start side by side, made small, with stand-ins for what isn't here."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word in SMALLER or word.startswith("tests/"))
    script, args = words[at], words[at + 1:]
    extra = list(SMALLER.get(script, ()))
    if script == "prepare.py" and any("fineweb" in arg or "TinyStories" in arg for arg in args):
        extra += ["--source=notes/*.txt"]  # for the hub's set
    if any(arg.startswith("config/quickstart") for arg in args) and script == "train.py":
        extra = [word for word in extra if "n_" not in word]  # as it is, for two steps
    start = [[sys.executable]]
    if "--nnodes=2" in words:  # two machines on one
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        start = [["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=1",
                  f"--rdzv_endpoint=localhost:{port}"]] * 2
    elif words[0] == "torchrun":
        start = [["--standalone", "--nproc_per_node=2"]]
    if words[0] == "torchrun":
        start = [[sys.executable, "-m", "torch.distributed.run", *one] for one in start]
    args = [str(ROOT / arg) if arg.startswith("config/") else arg for arg in args]
    return script, [[*one, str(ROOT / script), *args, *extra] for one in start * (2 if words[0] == "srun" else 1)]


def test_every_command_in_the_readme_works(desk):
    """Each as typed, made small; the hub's data and models, 8 GPUs and several machines by stand-ins."""
    seen, steps, places = [], 0, set()
    parts = [part.strip() for command in readme_commands() for part in command.split("&&")]
    for part in parts:
        if part.startswith("pip") or "pytest" in part or "bench_" in part or "timeit" in part:
            bench = re.search(r"tests/bench_\w+\.py", part)
            assert not bench or (ROOT / bench[0]).exists(), part
            continue
        script, commands = in_small(part)
        if script == "train.py":  # those that go on have something to go on from
            steps += 2
            place = (re.search(r"--out_dir=(\S+)", part) or re.search(r"config/(\w+)", part))[1]
            again = place in places and not re.search("init_from|quickstart", part)  # a folder for each run
            more = [f"--max_iters={steps}"] + [f"--out_dir=out/{steps}"] * again
            commands, places = [[*command, *more] for command in commands], places | {place}
        if "torchrun --nnodes" in part:
            commands = [[word.replace("out/", "out/shared-") for word in command] for command in commands]
        ranks = [{"SLURM_PROCID": str(i), "SLURM_NTASKS": "2"} if part.startswith("srun") else {}
                 for i in range(len(commands))]
        running = [subprocess.Popen(command, cwd=desk, env={**os.environ, **rank}, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                   for command, rank in zip(commands, ranks, strict=True)]
        for process in running:
            output = process.communicate(timeout=400)[0]
            assert process.returncode == 0, (part, output)
        seen.append(script)
    assert {*SMALLER} <= {*seen} and len(seen) > 15
    assert len(list((desk / "data/fineweb_100B").glob("meta_*.json"))) == 2
    assert (desk / "quickstart.svg").read_text().startswith("<svg")


def test_the_python_of_the_readme_works(desk):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    code = code.replace("out/quickstart/checkpoint-600", str(desk / "gpt2")).replace("=50", "=5")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_the_experiments_of_the_readme_apply_and_train(desk):
    """Each diff changes fewer than ten lines of train.py as it is today; the result trains, resumes, samples."""
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(diffs) == 3
    for n, diff in enumerate(diffs):
        home = desk / f"experiment-{n}"
        home.mkdir()
        for name in ("prepare.py", "sample.py", "hellaswag.py"):
            shutil.copy(ROOT / name, home)
        shutil.copytree(ROOT / "config", home / "config")
        code, lines = (ROOT / "train.py").read_text(), diff.splitlines()
        assert sum(line[0] in "+-" for line in lines) < 10
        hunks = re.findall(r"((?:^[ -].*\n)+)((?:^\+.*\n)*)", diff, re.M)
        for old, new in hunks:
            kept = "".join(line[1:] + "\n" for line in old.splitlines() if line[0] == " ")
            old = "".join(line[1:] + "\n" for line in old.splitlines())
            assert code.count(old) == 1, old
            code = code.replace(old, kept + "".join(line[1:] + "\n" for line in new.splitlines()))
        (home / "train.py").write_text(code)
        data = ("--dataset=notes", "--source=../notes/*.txt", "--tokenizer=bytes", "--val_tokens=3000")
        run = [["prepare.py", *data], ["train.py", "--dataset=notes", "--out_dir=out", *TINY, "--max_iters=2"],
               ["train.py", "--dataset=notes", "--out_dir=out", *TINY, "--max_iters=3", "--init_from=resume"],
               ["sample.py", "--out_dir=out", *SMALLER["sample.py"]]]
        for command in run:
            done = subprocess.run([sys.executable, *command], cwd=home, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tracker", ["trackio", "wandb"])
def test_a_tracker_gets_every_row_and_a_resumed_run_goes_on_in_it(desk, tracker, tmp_path):
    """trackio for real, offline; wandb, which wants an account, by a stand-in with its interface."""
    data = ("--dataset=tracked", "--source=notes/*.txt", "--tokenizer=bytes", "--val_tokens=3000")
    subprocess.run([sys.executable, ROOT / "prepare.py", *data], cwd=desk, check=True, capture_output=True)
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(tmp_path)}
    if tracker == "trackio":
        pytest.importorskip("trackio")
    else:
        (tmp_path / "wandb.py").write_text(
            "import json\n"
            "def init(**kw): note(init=kw)\n"
            "def log(row, step): note(step=step, **row)\n"
            "def note(**kw): open('wandb.txt', 'a').write(json.dumps(kw) + chr(10))\n")
    for steps in ("4", "6"):
        done = subprocess.run([sys.executable, ROOT / "train.py", "--dataset=tracked", f"--out_dir=out/{tracker}", *TINY,
                               "--log_interval=1", "--eval_interval=2", "--init_from=auto", f"--tracker={tracker}",
                               f"--max_iters={steps}"], cwd=desk, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    if tracker == "wandb":
        rows = [json.loads(line) for line in (desk / "wandb.txt").open()]
        assert [row["init"]["name"] for row in rows if "init" in row] == ["wandb"] * 2
        assert rows[0]["init"]["config"]["max_iters"] == 4
        # a run begun anew in a folder of an old one's name is not that run
        assert [row["init"]["resume"] for row in rows if "init" in row] == ["never", "allow"]
        steps = [row["step"] for row in rows if "loss" in row]
    else:
        out = subprocess.run([Path(sys.executable).parent / "trackio", "get", "metric", "--project=finegpt",
                              "--run=trackio", "--metric=loss", "--json"], env=env, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        steps = [row["step"] for row in json.loads(out.stdout)["values"]]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_quickstart_in_small(tmp_path, monkeypatch, run):
    """The README's first command at a few steps, typed twice; then from a copy of the checkpoint alone."""
    recipe = str(ROOT / "config/quickstart.py")
    small = ("--max_iters=4", "--eval_interval=2", "--eval_tokens=2048", "--compile=False", "--batch_size=2",
             "--total_batch_size=512")
    for _ in range(2):
        for script, args in (("prepare.py", ()), ("train.py", small), ("sample.py", ("--max_new_tokens=20",))):
            done = run(script, recipe, *args, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "out/quickstart/log.jsonl").open()]
    assert [row["step"] for row in log if "val_loss" in row] == [0, 2, 4]
    assert log[-1]["val_loss"] < math.log(257)
    alone = tmp_path / "elsewhere"
    (tmp_path / "out/quickstart/checkpoint-4").rename(alone)
    done = run("sample.py", "--checkpoint=elsewhere", "--max_new_tokens=5", "--compile=False", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_encodings_are_always_named(tmp_path, run):
    """-W error::EncodingWarning on text that isn't ASCII, through prepare, train and sample."""
    (tmp_path / "a.txt").write_text("é 中 🙂 naïve " * 400, encoding="utf-8")
    strict = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONIOENCODING": "ascii"}
    for script, args in (
            ("prepare.py", ("--dataset=t", "--source=a.txt", "--tokenizer=bytes")),
            ("train.py", ("--dataset=t", "--out_dir=out", "--n_layer=1", "--n_head=1", "--n_embd=16",
                          "--block_size=16", "--batch_size=1", "--total_batch_size=16", "--max_iters=1",
                          "--eval_tokens=16", "--compile=False")),
            ("sample.py", ("--out_dir=out", "--start=中", "--max_new_tokens=9", "--compile=False"))):
        code = ("import warnings, runpy, sys; warnings.filterwarnings('error', category=EncodingWarning, "
                f"module=r'(prepare|train|sample|config|__main__)'); sys.argv[0] = {str(ROOT / script)!r}; "
                f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_path(sys.argv[0], run_name='__main__')")
        done = subprocess.run([sys.executable, "-X", "warn_default_encoding", "-c", code, *args], cwd=tmp_path,
                              env={**os.environ, **strict}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()


def test_doctests():
    for name in ("config/__init__.py", "hellaswag.py"):
        subprocess.run([sys.executable, "-m", "doctest", ROOT / name], cwd=ROOT, check=True)


# --- Faults that were put in on purpose and that no test had seen

def test_only_rank_0_prints_the_settings(monkeypatch, capsys):
    for rank, said in (("0", 1), ("", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        configure("train.py")
        assert capsys.readouterr().out.count("settings:") == said


@pytest.mark.parametrize("argv,said", [("--max_iters=5x", "max_iters wants int"), ("--dropout=inf", "dropout wants float")])
def test_more_wrong_settings(capsys, argv, said):
    with pytest.raises(SystemExit):
        configure("train.py", argv)
    assert said in capsys.readouterr().err
