"""At most once: the bookkeeping of calls against a model that forgets nothing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transport.call_log import CallLog

REMEMBERED = 3


class CallLogMachine(RuleBasedStateMachine):
    """Ids arrive repeated and out of order, answers come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: CallLog[str] = CallLog(REMEMBERED)
        self.admitted: set[int] = set()
        self.running: list[int] = []
        self.answered: list[int] = []
        self.last = 0

    def arrive(self, call_id: int) -> None:
        if self.log.admit(call_id):
            assert call_id not in self.admitted
            self.admitted.add(call_id)
            self.running.append(call_id)

    @rule()
    def next_call(self):
        self.last += 1
        self.arrive(self.last)
        assert self.last in self.admitted

    @rule(skipped=st.integers(2, 3))
    def overtaken_calls(self, skipped):
        """The newest comes first, the ones it overtook come later or never."""
        self.last += skipped
        self.arrive(self.last)
        assert self.last in self.admitted

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def any_earlier_id(self, data):
        self.arrive(data.draw(st.integers(1, self.last)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data):
        call_id = data.draw(st.sampled_from(self.running))
        self.running.remove(call_id)
        self.answered.append(call_id)
        self.log.answered(call_id, f"reply {call_id}")

    @invariant()
    def recent_replies_are_at_hand_and_older_ones_are_gone(self):
        recent = self.answered[-REMEMBERED:]
        for call_id in self.admitted:
            expected = f"reply {call_id}" if call_id in recent else None
            assert self.log.reply(call_id) == expected

    @invariant()
    def running_calls_are_counted(self):
        assert self.log.running == len(self.running)

    @invariant()
    def a_call_still_running_or_remembered_is_never_admitted_again(self):
        for call_id in (*self.running, *self.answered):
            assert not self.log.admit(call_id)


TestCallLog = CallLogMachine.TestCase
TestCallLog.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_call_overtaken_by_one_is_still_run():
    log: CallLog[str] = CallLog(REMEMBERED)
    assert [log.admit(i) for i in (2, 1, 1, 2)] == [True, True, False, False]
