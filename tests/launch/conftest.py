import pytest

from start_llm.launch.clients import CLIENTS
from tests.launch.home import FAKE, Home


@pytest.fixture
def home(tmp_path) -> Home:
    home = Home(tmp_path)
    home.programs.mkdir()
    for client in CLIENTS.values():
        program = home.programs / client.command
        program.write_text(FAKE)
        program.chmod(0o755)
    return home
