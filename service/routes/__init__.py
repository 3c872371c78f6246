"""The API's routes, one file per noun."""

from fastapi import APIRouter

from . import (
    alertmanager,
    baselines,
    canary,
    events,
    faults,
    health,
    info,
    integrity,
    mitigations,
    recordings,
    scans,
    states,
)

ROUTERS: tuple[APIRouter, ...] = (
    states.router,
    scans.router,
    mitigations.router,
    alertmanager.router,
    baselines.router,
    integrity.router,
    recordings.router,
    canary.router,
    faults.router,
    events.router,
    info.router,
    health.router,
)
