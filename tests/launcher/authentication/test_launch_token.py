"""The token that people carry from one machine to another."""

import os
import resource
import stat
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.authentication import launch_token
from launcher.authentication.launch_token import ALPHABET, LaunchToken
from launcher.cli import run_options


def test_a_token_has_130_random_bits_and_is_never_drawn_twice():
    assert len({str(LaunchToken.draw()) for _ in range(200)}) == 200
    assert len(ALPHABET) == 32 and launch_token.NUM_DRAWN * 5 >= 128


@pytest.mark.parametrize(
    "typed",
    [
        str.lower,
        lambda text: text.replace("-", ""),
        lambda text: f"  {text.replace('-', ' ')}\n",
        lambda text: text.replace("0", "o").replace("1", "l"),
    ],
)
def test_a_token_is_that_of_another_case_with_or_without_dashes(typed):
    for _ in range(50):
        token = LaunchToken.draw()
        assert LaunchToken.parse(typed(str(token))) == token


def test_one_mistyped_character_is_noticed_before_anything_is_sent():
    text = str(LaunchToken.draw())
    places = [at for at, char in enumerate(text) if char != "-"]
    wrong = [text[:at] + ALPHABET[ALPHABET.index(text[at]) - 1] + text[at + 1 :] for at in places]
    noticed = sum(_is_refused(other) for other in wrong)
    assert noticed >= len(wrong) - 1  # of 1024 others, one has the same two characters


def _is_refused(text):
    try:
        LaunchToken.parse(text)
    except ValueError as error:
        assert text not in str(error)
        return True
    return False


@given(st.text(max_size=40))
def test_what_people_make_up_is_no_token_and_its_error_does_not_show_it(text):
    """A word is guessed in a second by whoever has recorded one handshake."""
    with pytest.raises(ValueError, match="token") as raised:
        LaunchToken.parse(f"pw{text[:24]}")
    assert f"pw{text[:24]}" not in str(raised.value)


def test_hexadecimal_digits_as_of_openssl_rand_are_a_token():
    assert LaunchToken.parse("5e" * 32).key == b"\x5e" * 32


def test_nothing_prints_the_key_of_a_token():
    token = LaunchToken.draw()
    assert token.key.hex() not in repr(token) and str(token) not in repr(token)
    assert repr(token.key) not in repr(token)


def test_a_new_file_is_for_its_owner_alone_and_holds_the_token(tmp_path):
    path = str(tmp_path / "token")
    token = launch_token.of_node(True, path, False)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert launch_token.of_node(True, path, False) == token
    assert launch_token.of_node(False, path, False) == token


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    """An empty one was left by a full disk, and was no token of the next launch."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ValueError, match=r"token cannot be written: File too large"):
            launch_token.of_node(True, str(tmp_path / "token"), False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text(str(LaunchToken.draw()))
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"can be read by other users.*chmod 600"):
        launch_token.of_node(False, str(path), False)
    path.chmod(0o600)
    launch_token.of_node(False, str(path), False)


def test_a_pipe_without_a_writer_is_not_waited_for_and_one_with_a_writer_is(tmp_path):
    os.mkfifo(path := tmp_path / "token", 0o600)
    with pytest.raises(ValueError, match="0 characters are not a token"):
        launch_token.of_node(False, str(path), False)
    token = LaunchToken.draw()
    read_end, write_end = os.pipe()  # as of `--token-file <(command)`
    threading.Timer(
        0.2, lambda: (os.write(write_end, str(token).encode()), os.close(write_end))
    ).start()
    assert launch_token.of_node(False, f"/dev/fd/{read_end}", False) == token
    os.close(read_end)


def test_a_file_that_is_not_there_is_an_error_on_all_but_the_first_node(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory"):
        launch_token.of_node(False, str(tmp_path / "token"), False)


def test_a_file_that_cannot_be_written_is_named_with_its_option(tmp_path):
    with pytest.raises(ValueError, match=r"--token-file .* cannot be written: No such file"):
        launch_token.of_node(True, str(tmp_path / "missing" / "token"), False)


@pytest.mark.parametrize("name", ["DRUMLINE_TOKEN", "DRUMLINE_SECRET"])
def test_a_variable_is_read_once_and_gone(monkeypatch, name):
    token = LaunchToken.draw()
    monkeypatch.setenv(name, str(token))
    assert launch_token.of_node(False, None, False) == token
    assert name not in os.environ
    with pytest.raises(ValueError, match="needs a token"):
        launch_token.of_node(False, None, False)


@pytest.mark.parametrize("error", [EOFError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "")])
def test_a_prompt_that_is_left_or_given_no_text_is_an_error_in_words(monkeypatch, error):
    """Ctrl-D was a traceback."""

    def getpass(_):
        raise error

    monkeypatch.setattr("getpass.getpass", getpass)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ValueError, match="0 characters are not a token"):
        launch_token.of_node(False, None, False)


def test_without_a_terminal_no_token_is_drawn_for_a_log():
    with pytest.raises(ValueError, match="--insecure goes without"):
        launch_token.of_node(True, None, False)
    with pytest.raises(ValueError, match=r"asks for it\.$"):  # `drumline join` has no --insecure
        run_options.token_to_join(SimpleNamespace(token_file=None))


def test_insecure_is_another_token_than_any_that_is_drawn_and_says_what_it_lets_in(caplog):
    assert not launch_token.of_node(True, None, True).is_secret
    assert LaunchToken.draw().is_secret
    assert caplog.text.count("whoever reaches the port of this launch becomes a rank") == 1
