"""What W&B's client knows of the service and of the user's login, asked quietly and without waiting."""

import contextlib
import logging
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

PROBE_TIMEOUT = 5.0  # seconds to wait for the service's port to answer, before its client tries for init_timeout


def set_up() -> Any:
    """Start the client, silent but for its warnings, without a run. Returns the settings it found."""
    import wandb

    logging.getLogger("wandb").propagate = False  # its log is debug.log in the run's folder, not the user's console
    settings = wandb.setup(wandb.Settings(show_info=False, show_errors=False)).settings
    wandb.termsetup(settings, None)  # setup does so only the first time in a process
    return settings


def forget_failed_run() -> None:
    """Restart the client's service process, which would otherwise call the id of a run that failed to start in use."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
    set_up()


def is_logged_in(service_settings: Any) -> bool:
    """Whether the environment, netrc or wandb's settings hold a key for the configured host. Asks nobody."""
    from wandb.sdk.lib import wbauth

    credentials = wbauth.authenticate_session(
        host=service_settings.base_url, source="shardwise", prompt=False, update_session=False
    )
    return credentials is not None


def why_unreachable(service_settings: Any) -> str | None:
    """Why no connection to the service can be made, or to the proxy on the way; None if one can."""
    if service_settings.http_proxy or service_settings.https_proxy:
        return None
    target = urlsplit(service_settings.base_url)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and target.hostname and not urllib.request.proxy_bypass(target.hostname):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (target.hostname or "", target.port or (443 if target.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=PROBE_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
