"""From the configuration of a tier to what the agent is told, and back to the rules in it."""

from __future__ import annotations

from tieredckpt.policy.config import TierConfig
from tieredckpt.policy.retention import Best, Keep
from tieredckpt.policy.units import Every
from tieredckpt.transport import messages as m


def tier_spec(tier: TierConfig) -> m.TierSpec:
    """What the agent is told of ``tier``."""
    alarm = tier.lag_alarm
    return m.TierSpec(
        name=tier.name,
        url=tier.url,
        scope=tier.scope,
        keep_last=tier.keep.last,
        keep=_rules(tier.keep),
        source=tier.source,
        on_pressure=tier.on_pressure,
        lag_alarm_steps=alarm.steps if alarm is not None else None,
        lag_alarm_s=alarm.seconds if alarm is not None else None,
        takeover_after_s=tier.takeover_after_s,
        delete_delay_s=tier.delete_delay_s,
        sweep_after_s=tier.sweep_after_s,
        object=tier.object,
    )


def _rules(keep: Keep) -> m.KeepRules:
    best = keep.best
    return m.KeepRules(
        every_steps=keep.every.steps if keep.every is not None else None,
        every_s=keep.every.seconds if keep.every is not None else None,
        max_age_s=keep.max_age_s,
        max_bytes=keep.max_bytes,
        best=None if best is None else m.KeepBest(metric=best.metric, mode=best.mode, n=best.n),
        everything=keep.everything,
    )


def keep_of(spec: m.TierSpec) -> Keep:
    """The retention that a tier's spec asks for."""
    rules = spec.keep
    by_step = rules.every_steps is not None or rules.every_s is not None
    return Keep(
        last=spec.keep_last,
        # A hostile client may send both; one of them is as good as the other.
        every=Every(
            steps=rules.every_steps, seconds=rules.every_s if rules.every_steps is None else None
        )
        if by_step
        else None,
        max_age_s=rules.max_age_s,
        max_bytes=rules.max_bytes,
        best=None
        if rules.best is None
        else Best(metric=rules.best.metric, mode=rules.best.mode, n=rules.best.n),
        everything=rules.everything,
    )
