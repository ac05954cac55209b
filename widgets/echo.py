"""How far the browser is with what it was sent."""

import asyncio
import time

import anywidget
import traitlets

POLL_SECONDS = 0.05


class Echo(anywidget.AnyWidget):
    """An empty widget that answers once the browser has drawn what came before.

    A browser that draws slower than the kernel sends falls behind without end: after some minutes its
    buttons and other figures react to what was sent minutes ago. Messages keep their order, so whoever
    waits for the answer before sending more is never more than one update ahead.
    """

    _esm = """
    function render({ model }) {
      const answer = () => setTimeout(() => model.send({ drawn: model.get("asked") }));
      model.on("change:asked", answer);
      return () => model.off("change:asked", answer);
    }
    export default { render };
    """
    asked = traitlets.Int(0, help="Questions so far.").tag(sync=True)
    drawn = 0
    """The last question that the browser has answered."""

    def __init__(self) -> None:
        super().__init__()
        # A message, not a second trait: a model keeps a change back until the kernel is done with the last.
        self.on_msg(lambda _, content, __: self._answered(content["drawn"]))

    def _answered(self, question: int) -> None:
        self.drawn = question

    async def wait(self, seconds: float) -> None:
        """Returns once the browser has drawn everything sent so far, or after `seconds`: perhaps nobody
        looks, or the notebook is open where widgets are not served while a cell awaits."""
        self.asked += 1
        deadline = time.monotonic() + seconds
        while self.drawn < self.asked and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
