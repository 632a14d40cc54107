"""`launch` and `config` as a user calls them: real processes, a real server, a client that tells."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping

import pytest

from start_llm.commands.client_commands import unsuited_for
from start_llm.launch.clients import CLIENTS
from start_llm.launch.http_requests import Address
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.server_info import NO_KEY, find
from start_llm.launch.setup import make_setup
from tests.launch.home import ROOT, answering, page
from tests.serving import Server, serving

WINDOW = 5000
LEFT_OUT = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS"})
"""Variables that shells set of themselves."""


@pytest.fixture(scope="module")
def server(tiny_model) -> Generator[Server]:
    with serving(tiny_model("qwen3"), max_kv_size=WINDOW) as server:
        yield server


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in LEFT_OUT}


# -----------------------------------------------------------------------------------------a client that runs


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLIENTS)
def test_the_client_gets_what_its_row_says_and_nothing_else_changes(name, home, server):
    words = ["-p", "two words", "--model=x", "--help", "--base-url", "y", "--", ""]
    before = home.environment(name)
    done = home.run("launch", "--base-url", server.url, name, *words, env=before)
    start = home.client_start()
    folder = home.state / "clients" / name
    setup = make_setup(
        CLIENTS[name],
        find([Address(server.url, NO_KEY)]),
        folder,
        OwnSettings(variables=before, work=ROOT),
    )
    expected = "".join(f"{note}\n" for note in setup.notes)
    if why := unsuited_for(setup.served).get(name):
        expected += f"{name} does not suit {setup.served.model}: {why}.\n"
        expected += "These suit it: pi, continue. Try: start_llm launch pi\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", expected)
    assert start.arguments == words
    assert start.cwd == str(ROOT)
    assert own_variables(start.environment) == own_variables(setup.over(before))
    assert {path: json.loads(text) for path, text in start.files.items() if path.endswith(".json")} == {
        str(path): content for path, content in setup.files.items() if path.suffix == ".json"
    }
    assert start.files.keys() == {str(path) for path in setup.files}
    assert setup.served.window == WINDOW
    assert setup.served.reply == WINDOW // 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLIENTS)
def test_the_printed_lines_do_in_a_shell_what_launch_does(name, home, server):
    home.run("launch", "--base-url", server.url, name)
    launched = home.client_start()
    shutil.rmtree(home.state)
    script = home.run("config", "--base-url", server.url, name, name=name)
    assert (script.returncode, script.stderr) == (0, "")
    assert script.stdout.splitlines()[-1] == CLIENTS[name].command
    assert not home.state.exists(), "printing writes nothing"
    foreign = dict.fromkeys(CLIENTS[name].foreign, "elsewhere")
    environment = home.environment("pi") | foreign
    subprocess.run(["bash", "-c", script.stdout], env=environment, cwd=ROOT, check=True, timeout=60)
    pasted = home.client_start()
    assert own_variables(pasted.environment) == own_variables(launched.environment)
    assert pasted.files == launched.files
    assert pasted.arguments == []


@pytest.mark.thorough
def test_what_a_client_keeps_in_its_folder_is_there_the_next_time(home, server):
    assert home.run("launch", "--base-url", server.url, "codex").returncode == 0
    folder = home.state / "clients" / "codex"
    (folder / "sessions").mkdir()
    (folder / "sessions" / "one").write_text("said")
    with (folder / "config.toml").open("a") as config:
        config.write('[projects."/p"]\ntrust_level = "trusted"\n')
    assert home.run("launch", "--base-url", server.url, "codex", name="codex").returncode == 0
    start = home.client_start()
    assert start.files[str(folder / "sessions" / "one")] == "said"
    assert 'trust_level = "trusted"' in start.files[str(folder / "config.toml")]


@pytest.mark.thorough
def test_the_key_is_the_proxys_and_a_placeholder_without_one(home, server):
    keyed = home.environment("claude", PROXY_API_KEY="sk-mine")
    assert home.run("launch", "--base-url", server.url, "claude", env=keyed).returncode == 0
    assert home.client_start().environment["ANTHROPIC_AUTH_TOKEN"] == "sk-mine"
    assert home.run("launch", "--base-url", server.url, "claude").returncode == 0
    assert home.client_start().environment["ANTHROPIC_AUTH_TOKEN"] == "local"


@pytest.mark.thorough
def test_a_server_that_asks_for_a_key_gets_it(home, tiny_model):
    with serving(tiny_model("qwen3"), access_keys=("sk-own", "sk-other")) as server:
        own = home.environment(
            "claude", MLX_API_KEY="sk-own,sk-third", MLX_PORT=str(server.port), PROXY="false"
        )
        assert home.run("launch", "claude", env=own).returncode == 0
        assert home.client_start().environment["ANTHROPIC_AUTH_TOKEN"] == "sk-own"
        assert all("sk-own" not in path.read_text() for path in home.state.rglob("*") if path.is_file())
        without = home.run(
            "launch",
            "claude",
            env=home.environment("claude") | {"MLX_PORT": str(server.port), "PROXY": "false"},
        )
        assert without.returncode == 2
        assert "set PROXY_API_KEY or MLX_API_KEY" in without.stderr


@pytest.mark.thorough
def test_the_server_is_found_by_the_settings_also_while_its_proxy_is_not_there(home, server):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        ports = {"PROXY_PORT": str(nobody.getsockname()[1]), "MLX_PORT": str(server.port)}
        assert home.run("launch", "claude", env=home.environment("claude", **ports)).returncode == 0
    assert home.client_start().environment["ANTHROPIC_BASE_URL"] == server.url


@pytest.mark.thorough
def test_a_base_url_may_end_in_v1_as_openai_clients_write_it(home, server):
    assert home.run("launch", "--base-url", f"{server.url}/v1/", "claude").returncode == 0
    assert home.client_start().environment["ANTHROPIC_BASE_URL"] == server.url


@pytest.mark.long
def test_a_name_with_quotes_and_spaces_reaches_the_client(home, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / 'it\'s a "tiny" $model')
    with serving(folder) as server:
        for name in ("claude", "codex"):
            home.run("launch", "--base-url", server.url, name, name=name)
            launched = home.client_start()
            script = home.run("config", "--base-url", server.url, name, name=name).stdout
            subprocess.run(["bash", "-c", script], env=home.environment(name), check=True, timeout=60)
            pasted = home.client_start()
            assert pasted.files == launched.files
            assert own_variables(pasted.environment) == own_variables(launched.environment)
    assert (
        f"model = {json.dumps(folder.name)}\n" in pasted.files[str(home.state / "clients/codex/config.toml")]
    )


@pytest.mark.thorough
def test_warm_asks_the_server_for_what_the_client_begins_with(home, server):
    done = home.run("warm", "--base-url", server.url, "pi", env=home.environment("pi"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{server.url} has answered no conversation of pi with this key")


# ----------------------------------------------------------------------------------------status and signals


@pytest.mark.thorough
@pytest.mark.parametrize("status", [0, 1, 42])
def test_the_exit_status_is_the_clients(status, home, server):
    assert home.run("launch", "--base-url", server.url, "pi", "exit", str(status)).returncode == status


@pytest.mark.thorough
def test_standard_input_and_output_are_the_clients(home, server):
    done = home.run("launch", "--base-url", server.url, "pi", "echo", input="said\nand done")
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\nand done", "")


@pytest.mark.thorough
def test_the_client_does_not_inherit_what_python_ignores(home, server):
    """With SIGPIPE ignored, `yes` complains of a broken pipe."""
    (home.programs / "pi").write_text("#!/bin/sh\nyes | head -n 1\n")
    done = home.run("launch", "--base-url", server.url, "pi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "y\n", "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("behaviour", "status"), [("wait", lambda number: -number), ("catch", lambda n: 100 + n)]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_client_and_its_end_is_seen(number, behaviour, status, home, server):
    command = [sys.executable, "-m", "start_llm", "launch", "--base-url", server.url, "pi", behaviour]
    with subprocess.Popen(
        command,
        env=home.environment("pi"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        assert home.client_start().pid == process.pid, "the client is the process that was started"
        process.send_signal(number)
        assert process.wait(20) == status(number)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.long
def test_a_client_that_is_not_there_is_reported_with_how_to_install_it(home, server):
    for name, client in CLIENTS.items():
        environment = home.environment(name, PATH="/nowhere")
        done = home.run("launch", "--base-url", server.url, name, env=environment)
        assert done.returncode == 2
        assert done.stderr == (
            f"start_llm cannot set {name} up.\n"
            f"{client.command} is not on PATH. It is installed with: {client.install}\n"
        )
    assert not home.state.exists()


@pytest.mark.thorough
def test_a_program_that_cannot_be_run_is_reported(home, server):
    (home.programs / "pi").write_text("#!/no/such/interpreter\n")
    done = home.run("launch", "--base-url", server.url, "pi")
    assert done.returncode == 2
    assert "bin/pi cannot be run: No such file or directory." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_without_a_server_both_addresses_are_named(home):
    with socket.socket() as first, socket.socket() as other:
        for nobody in (first, other):
            nobody.bind(("127.0.0.1", 0))
        proxy, own = (str(nobody.getsockname()[1]) for nobody in (first, other))
        environment = home.environment("pi", PROXY_PORT=proxy, MLX_PORT=own)
        for command in ("launch", "config"):
            done = home.run(command, "pi", env=environment)
            assert (done.returncode, done.stdout) == (2, "")
            assert f"No server answers at http://127.0.0.1:{proxy} or http://127.0.0.1:{own}." in done.stderr
    assert not home.state.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (
            page("<html>router</html>"),
            "names no model with a context window, as this server does. It says: <html>",
        ),
        (page('{"data": []}'), "names no model with a context window"),
        (page('{"data": [{"id": "m"}]}'), "names no model with a context window"),
        (page('{"data": [{"id": "m", "context_window": "much"}]}'), "names no model with a context window"),
        (page('{"data": [{"id": 7, "context_window": 8}]}'), "names no model with a context window"),
        (page('{"data": [{"id": "m\\nrm -r x", "context_window": 8}]}'), "names no model with a context"),
        (page("[]"), "names no model with a context window"),
        (page("no", "404 Not Found"), "/v1/models refuses (404)."),
        (
            page("no", "401 Unauthorized"),
            "does not take the key: set PROXY_API_KEY or MLX_API_KEY to the server's (401).",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "gives no answer of a server: "),
        (b"", "gives no answer of a server: "),
    ],
)
def test_something_else_that_answers_is_reported(reply, sentence, home):
    with answering(reply) as url:
        done = home.run("launch", "--base-url", url, "pi")
    assert done.returncode == 2
    assert done.stderr.startswith(f"start_llm cannot set pi up.\n{url}")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not home.state.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8080", "file:///etc/passwd"])
def test_an_address_that_is_none_is_reported(url, home):
    done = home.run("launch", "--base-url", url, "pi")
    assert done.returncode == 2
    assert "an address begins with http:// or https://" in done.stderr


def test_other_servers_that_tell_a_window_under_another_name_do(home):
    for name in ("max_input_tokens", "max_model_len", "context_length"):
        with answering(
            page(json.dumps({"data": [{"id": "m", name: 8192, "max_output_tokens": 1000}]}))
        ) as url:
            served = find([Address(url, NO_KEY)])
        assert (served.window, served.reply) == (8192, 1000)


@pytest.mark.thorough
def test_a_proxy_of_the_environment_is_not_asked_for_a_server_here(home, server):
    environment = home.environment("pi", HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9")
    environment = {name: value for name, value in environment.items() if name.lower() != "no_proxy"}
    assert home.run("launch", "--base-url", server.url, "pi", env=environment).returncode == 0
    assert home.client_start().environment["no_proxy"] == "127.0.0.1,localhost,::1"


@pytest.mark.thorough
def test_a_client_starts_at_once(home, server):
    """None of the imports that take seconds."""
    code = "import sys, start_llm.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"mlx", "mlx_lm", "transformers", "numpy"} & set(done.stdout.split())


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["launch"], ["config"], ["launch", "vim"], ["config", "pi", "more"]])
def test_a_command_line_that_is_not_understood_is_explained(words, home):
    done = home.run(*words)
    assert done.returncode == 2
    assert "usage: start_llm" in done.stderr
