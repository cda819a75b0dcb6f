"""Exchanges of several messages, which start when their predecessors are complete."""

from __future__ import annotations

from pydist.comm.interface.handles import Work
from pydist.gradients.forms.messages import Final, Sequel


class Message(Work):
    def __init__(self, log, name):
        self._log, self.name, self.has_arrived = log, name, False
        log.append(f"start {name}")

    def done(self):
        return self.has_arrived

    def wait(self):
        self._log.append(f"wait {self.name}")


def test_a_message_starts_when_the_one_before_is_complete():
    log, made = [], []

    def messages():
        for name in "abc":
            made.append(Message(log, name))
            yield made[-1]
        log.append("end")

    work = Sequel(messages())
    assert log == ["start a"]
    assert not work.advance()
    assert log == ["start a"]
    made[0].has_arrived = True
    assert not work.advance()
    assert log == ["start a", "wait a", "start b"]
    work.wait()
    assert log[3:] == ["wait b", "start c", "wait c", "end"]
    assert work.advance()
    work.wait()
    assert log[-1] == "end"


def test_messages_that_are_complete_start_one_after_the_other():
    log = []

    def messages():
        for name in "abc":
            message = Message(log, name)
            message.has_arrived = True
            yield message

    assert Sequel(messages()).advance()
    assert log == ["start a", "wait a", "start b", "wait b", "start c", "wait c"]


def test_an_exchange_without_messages_is_complete():
    assert Sequel(iter(())).advance()


def test_an_exchange_has_advanced_when_its_last_message_has_started():
    """What follows that message is computed in `wait`."""
    log, made = [], []

    def messages():
        made.append(Message(log, "a"))
        yield made[0]
        made.append(Message(log, "b"))
        yield Final(made[1])
        log.append("end")

    work = Sequel(messages())
    assert not work.advance()
    made[0].has_arrived = True
    assert work.advance()
    made[1].has_arrived = True
    assert work.advance()
    assert log == ["start a", "wait a", "start b"]
    work.wait()
    assert log[3:] == ["wait b", "end"]
