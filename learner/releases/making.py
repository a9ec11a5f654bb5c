"""Makes the releases of a run: beside its learner; or, where none lives, for a change by hand."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from learner.journal.manifest import Signer
from learner.releases.channel import ReleaseChannel
from learner.releases.config import ReleaseConfig
from learner.releases.feedback import FeedbackStore
from learner.releases.history import ReleaseHistory
from learner.releases.kept_weights import FOLDER, KeptWeights
from learner.releases.metrics import ReleaseMetrics
from learner.releases.releases import EVALUATED_WITH, Releases, ignored
from learner.weights.fleet import FleetMembers
from learner.weights.published import PublisherOptions
from protocol.fleet import Channel, Fingerprints
from services.http.client import HttpClient

_NO_GENERATORS = PublisherOptions(
    incarnation=1,
    backend="gloo",
    host="127.0.0.1",
    bucket_timeout_s=1.0,
    meet_timeout_s=1.0,
    commit_timeout_s=1.0,
    pull_timeout_s=1.0,
    probe_tolerance=None,
)


def make_releases(
    config: ReleaseConfig,
    *,
    run: Path,
    success: float,
    secret_key_file: Path | None,
    may_write: Callable[[], None],
    make_fleet: Callable[[Callable[[], None]], FleetMembers],
    client: HttpClient,
    options: PublisherOptions,
    metrics: ReleaseMetrics | None = None,
    settings: Mapping[str, object] | None = None,
) -> Releases:
    """The releases in a run's folder. `make_fleet` makes the fleet of a channel, which tells of its changes. `settings`
    are those of this start, by which what is kept from now on is made.
    """
    weights = KeptWeights(run, signer=Signer.read(secret_key_file), may_write=may_write)
    history = ReleaseHistory(weights.folder, may_write=may_write)
    made: list[Releases] = []
    first_proofs = history.fingerprints()
    given = {} if settings is None else _made_by(settings)
    if metrics is not None:
        metrics.released(lambda: history.state.released)

    def channel(name: Channel) -> ReleaseChannel:
        return ReleaseChannel(
            name,
            make_fleet=make_fleet,
            client=client,
            options=options,
            first_proofs=first_proofs,
            proven=lambda *proof: made[0].proven(*proof),
        )

    made.append(
        Releases(
            config=config,
            success=success,
            history=history,
            weights=weights,
            first_proofs=first_proofs,
            released=channel("released"),
            canary=channel("canary"),
            made=lambda _: given,
            noted=ignored if metrics is None else metrics.noted,
        )
    )
    return made[0]


def _made_by(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Names of the model and of all settings, which `made_with.json` in the run's folder has in words."""
    digest = sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    names = ("model", "model_fingerprint", "algo.type", "seed", "max_lag", *EVALUATED_WITH)
    return {**{name: settings[name] for name in names if name in settings}, "settings_sha256": digest}


def make_feedback(
    config: ReleaseConfig, *, releases: Releases, run: Path, may_write: Callable[[], None]
) -> FeedbackStore:
    """The answers and rewards of a run's users, by which its trials are decided."""
    store = FeedbackStore(
        run / FOLDER, room_bytes=config.feedback_mb << 20, may_write=may_write, versions=releases.kept()
    )
    releases.rewards, releases.keep_rewards = store.rewards, store.keep_rewards
    return store


def releases_without_learner(
    config: ReleaseConfig, *, run: Path, secret_key_file: Path | None, may_write: Callable[[], None]
) -> Releases:
    """The releases of a run that nobody runs. The caller has the run's folder."""
    return make_releases(
        config,
        run=run,
        success=1.0,
        secret_key_file=secret_key_file,
        may_write=may_write,
        make_fleet=lambda changed: FleetMembers(
            fingerprints=Fingerprints(model="", tokenizer="", chat_template=""),
            incarnation=1,
            announce_every_s=1.0,
            silence_s=1.0,
            changed=changed,
        ),
        client=HttpClient(),
        options=_NO_GENERATORS,
    )
