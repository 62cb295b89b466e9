"""The file that names the machines of a swarm, and one sentence for each mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.launch.swarm_file import BOOTSTRAP_PORT, EXAMPLE, load

ONE = '[[machine]]\nssh = "me@host"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "swarm.toml"
    path.write_text(text)
    return path


def test_the_example_is_read(tmp_path: Path) -> None:
    """What the errors show works: names, machines, and defaults for the rest."""
    swarm = load(written(tmp_path, EXAMPLE))
    assert (swarm.run, swarm.bootstrap_port) == ("my-run", BOOTSTRAP_PORT)
    assert swarm.closed
    assert swarm.install
    assert [machine.name for machine in swarm.machines] == ["lab", "cloud"]
    assert swarm.machine("cloud").arguments == ("--region", "eu-west")
    assert swarm.packages == ("torch==2.13.0",)


def test_what_is_shared_holds_for_each_machine(tmp_path: Path) -> None:
    """A machine's own words win; its name is its host by default; paths stand beside the file."""
    text = 'run = "r"\npython = "p1"\ndirectory = "code"\n[environment]\nA = "1"\nB = "1"\n'
    own = '[[machine]]\nssh = "me@h.org"\n[[machine]]\nssh = "x"\npython = "p2"\n'
    own += '[machine.environment]\nB = "2"\n'
    (tmp_path / "code").mkdir()
    swarm = load(written(tmp_path, text + own))
    first, second = swarm.machines
    assert (first.name, first.python, dict(first.environment)) == ("h.org", "p1", {"A": "1", "B": "1"})
    assert (second.python, dict(second.environment)) == ("p2", {"A": "1", "B": "2"})
    assert swarm.directory == tmp_path / "code"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run = ", "is not TOML"),
        (ONE, "'run' is missing"),
        ('run = "a b"\n' + ONE, "characters beside letters"),
        ('run = "r"\n', r"has no \[\[machine\]\]"),
        ('run = "r"\nrnu = 1\n' + ONE, "there is no key 'rnu'"),
        ('run = "r"\ninstall = "no"\n' + ONE, "'install' is not of type bool"),
        ('run = "r"\nbootstrap = "nowhere"\n' + ONE, "nowhere"),
        ('run = "r"\nbootstrap_port = 70000\n' + ONE, "is no port"),
        ('run = "r"\n[[machine]]\n', "characters beside letters"),
        ('run = "r"\n[[machine]]\nssh = "-oProxyCommand=x"\n', "is nothing that ssh is called with"),
        ('run = "r"\n' + ONE + ONE, "the name 'host' is there twice"),
        ('run = "r"\n[[machine]]\nssh = "h"\nname = "a;b"\n', "characters beside letters"),
        ('run = "r"\n[[machine]]\nssh = "h"\nname = "bootstrap"\n', "is that of the node"),
        ('run = "r"\npackages = [1]\n' + ONE, "'packages' is a list of texts"),
        ('run = "r"\npackages = ["-r x.txt"]\n' + ONE, "packages: '-r x.txt' is none; options of pip stand"),
        ('run = "r"\npackages = ["torch\\nRUN x"]\n' + ONE, r"packages: 'torch\\nRUN x' is none"),
        ('run = "r"\nmachines = []\n' + ONE, "there is no key 'machines'; did you mean 'machine'"),
        ('run = "r"\n' + ONE + 'sssh = "x"\n', "there is no key 'sssh'; did you mean 'ssh'"),
        ('run = "r"\n' + ONE + 'address = "h:1"\n', "address = 'h:1' is no host, without a port"),
        ('run = "r"\n' + ONE + 'address = "$(x)"\n', "is no host"),
        ('run = "r"\n' + ONE + 'arguments = ["a\\u0000"]\n', "'arguments' is a list of texts"),
        ('run = "r"\n[environment]\n"A=B" = "1"\n' + ONE, "environment: 'A=B' is no name of a variable"),
        ('run = "r"\n[environment]\nA = "\\u0000"\n' + ONE, "values of 'environment' are texts"),
        (
            'run = "r"\nconstraints = "none.txt"\n' + ONE,
            r"constraints = 'none.txt', and .*none.txt is no file",
        ),
        ('run = "r"\nssh_config = "none"\n' + ONE, "ssh_config = 'none', and .* is no file"),
        ('run = "r"\ndirectory = "none"\n' + ONE, "directory = 'none', and .* is no folder"),
        ('run = "r"\n[environment]\nA = 1\n' + ONE, "values of 'environment' are texts"),
        ('run = "r"\n[pip]\nINDEX = "x"\n' + ONE, "'INDEX' is no option of pip"),
        ('run = "r"\n[pip]\nindex-url = "x\\ny"\n' + ONE, "'index-url' is no option of pip on one line"),
        ('run = "r"\n[pip]\ntimeout = 1.5\n' + ONE, "'timeout' is a text, a number, true, false"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    """It names the file and what is wrong there."""
    with pytest.raises(ConfigurationError, match=says):
        load(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The sentence names the path."""
    with pytest.raises(ConfigurationError, match=r"none\.toml cannot be read"):
        load(tmp_path / "none.toml")


def test_a_machine_that_the_file_does_not_name(tmp_path: Path) -> None:
    """The sentence names those that it has."""
    with pytest.raises(ConfigurationError, match="no machine 'x'; it has host"):
        load(written(tmp_path, 'run = "r"\n' + ONE)).machine("x")
