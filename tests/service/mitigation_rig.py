"""A mitigator and its automatic half over a fake probe, a fake clock and a loss that gates and weights decide."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from flipwatch.monitors.finding import Health
from flipwatch.monitors.fingerprint.facts import FingerprintReading, RepairOrder, RepairReport
from flipwatch.monitors.verdict.verdict import Joined, Verdict
from flipwatch.monitors.wire import Gate, GateChange, GateReport, ModelFacts, SelfTest, SelfTestState
from flipwatch.service.automatic import Automatic
from flipwatch.service.gates import with_gates
from flipwatch.service.live import MonitorState
from flipwatch.service.mitigation import Mitigator
from flipwatch.service.policy import Rule
from flipwatch.service.probe import ProbeAway, ProbeRefused
from flipwatch.service.records import MitigationAction, MitigationRecord
from flipwatch.service.repair_steps import SweepUnavailable
from flipwatch.service.settings import MitigationSettings
from flipwatch.service.store import Store

from .fake_weights import FakeWeights


async def unswept() -> FingerprintReading:
    """The sweep of a server whose weights nobody looks at."""
    raise SweepUnavailable("There are no fingerprints.")


class FakeProbe:
    """A probe of six blocks without a model behind it.

    `on_set` runs before the gates are written and may raise, `on_repair` before chunks are; `deaf` makes writes
    without effect.
    """

    def __init__(self) -> None:
        self.gates = [1.0] * 6
        self.boot_id = "boot-1"
        self.armed = True
        self.self_test = SelfTestState.PASSED
        self.away = False
        self.deaf = False
        self.writes: list[GateChange] = []
        self.on_set: Callable[[], Awaitable[None]] | None = None
        self.weights = FakeWeights()
        self.repairs: list[RepairOrder] = []
        self.on_repair: Callable[[], Awaitable[None]] | None = None

    async def facts(self) -> ModelFacts:
        """The facts as set on this fake."""
        if self.away:
            raise ProbeAway("vLLM cannot be reached.")
        return ModelFacts(
            boot_id=self.boot_id,
            model="tiny",
            architecture="LlamaForCausalLM",
            layer_class="LlamaDecoderLayer",
            num_blocks=len(self.gates) if self.armed else 0,
            armed=self.armed,
            refusal=None if self.armed else "LlamaDecoderLayer is not supported.",
            scan_refusal=None,
            model_digest="0123456789abcdef",
            mode="eager",
            dtype="float32",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            max_tokens=64,
            gates=list(self.gates),
            self_test=SelfTest(state=self.self_test, reason="Tried on 6 blocks."),
            faults_enabled=False,
            faults=[],
            flipwatch_version="0.1.0",
            vllm_version="0.32.0",
            torch_version="2.13.0",
            hardware="cpu AVX512",
        )

    async def set_gates(self, change: GateChange) -> GateReport:
        """Keep the order and set the gates."""
        self.writes.append(change)
        if self.on_set is not None:
            await self.on_set()
        if change.boot_id != self.boot_id:
            raise ProbeRefused(409, "vLLM was restarted.")
        if not self.deaf:
            for gate in change.gates:
                # A gate lies in a float32 on the device.
                self.gates[gate.block] = 0.30000001192092896 if gate.alpha == 0.3 else gate.alpha
        return GateReport(gates=list(self.gates), paused_seconds=0.125)

    async def repair(self, order: RepairOrder) -> RepairReport:
        """Keep the order and repair the fake weights."""
        self.repairs.append(order)
        if self.on_repair is not None:
            await self.on_repair()
        if order.boot_id != self.boot_id:
            raise ProbeRefused(409, "vLLM was restarted.")
        return self.weights.repair(order)

    def restart(self) -> None:
        """A new vLLM process: all gates are 1, all bytes are good."""
        self.weights.reload()
        self.gates = [1.0] * len(self.gates)
        self.boot_id = "boot-2"


class Rig:
    """See the module's docstring.  The loss depends on block 4: 7 nats, without it 4, with its weights repaired 3."""

    def __init__(
        self,
        store: Store | None = None,
        probe: FakeProbe | None = None,
        rules: Sequence[dict[str, Any]] = (),
        **settings: Any,
    ) -> None:
        self.store = store or Store(None)
        self.probe = probe or FakeProbe()
        self.clock = 1000.0
        self.losses: list[float | Exception | None] = []
        self.readings: list[FingerprintReading | Exception] = []
        self.sweeps = 0
        self.on_sweep: Callable[[], None] = lambda: None
        """Runs after each look at the weights."""
        self.settings = MitigationSettings.model_validate({"mode": "enforce"} | settings)
        self.scanned: MonitorState | None = None
        self.mitigator = Mitigator(
            self.probe,
            self.store,
            self.settings,
            self.measure,
            lambda boot_id: self.scanned,
            self.sweep,
            now=lambda: self.clock,
            measure_seconds=5.0,
        )
        self.rules = [Rule.model_validate(rule) for rule in rules]
        self.automatic = Automatic(self.rules, self.mitigator, self.store, self.settings, now=lambda: self.clock)

    async def measure(self, as_if: Sequence[Gate]) -> float | None:
        """The next prepared loss, or the one that belongs to the gates and the bytes."""
        if not self.losses:
            whole = 3.0 if 4 in self.probe.weights.repaired else 7.0
            return whole if with_gates(self.probe.gates, as_if)[4] == 1.0 else 4.0
        loss = self.losses.pop(0)
        if isinstance(loss, Exception):
            raise loss
        return loss

    async def sweep(self) -> FingerprintReading:
        """The next prepared reading, or the true one."""
        self.sweeps += 1
        prepared = self.readings.pop(0) if self.readings else self.probe.weights.reading()
        self.on_sweep()
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    async def repair(self, *blocks: int, **more: Any) -> MitigationRecord:
        """Repair these blocks, or all that has changed, and wait for the end."""
        record = await self.mitigator.repair(blocks or None, **({"reason": "test", "actor": "alice"} | more))
        return await self.ended(record)

    async def apply(self, *blocks: int, **more: Any) -> MitigationRecord:
        """Apply and wait for the end."""
        order = {"action": MitigationAction.SKIP, "blocks": blocks, "reason": "test", "actor": "alice"} | more
        record = await self.mitigator.apply(**order)
        return await self.ended(record)

    async def judged(
        self, verdict: Verdict, *blocks: int, confirmed: Collection[int] | None = None, news: bool = True
    ) -> MitigationRecord | None:
        """One verdict that points at these blocks, confirmed unless said; what it led to, when that has ended.

        It rests on something new, one second later, unless said.
        """
        self.clock += news
        joined = Joined(verdict=verdict, health=Health.FAILED, reason="Block 4 does harm.", blocks=blocks)
        confirmed = blocks if confirmed is None else confirmed
        record = await self.automatic.consider(joined, self.probe.boot_id, confirmed, self.clock)
        return None if record is None else await self.ended(record)

    def decisions(self) -> list[tuple[str, str]]:
        """What the audit log says of automation, oldest first: what, and why."""
        return [
            (event.what.removeprefix("automation "), event.detail["message"])
            for event in reversed(self.store.events(1000))
            if event.what.startswith("automation")
        ]

    async def undo(self, record: MitigationRecord) -> MitigationRecord:
        """Undo and wait for the end."""
        return await self.ended(await self.mitigator.undo(record.id, actor="bob"))

    async def ended(self, record: MitigationRecord) -> MitigationRecord:
        """The record as stored once nothing runs."""
        await self.mitigator.settled()
        return self.stored(record)

    def stored(self, record: MitigationRecord) -> MitigationRecord:
        """The record as stored now."""
        stored = self.store.mitigation(record.id)
        assert stored is not None
        return stored

    def history(self) -> list[str]:
        """What the audit log says, oldest first."""
        return [event.what.removeprefix("mitigation ") for event in reversed(self.store.events())]
