"""Security checks of a gateway's configuration: unsafe values are refused at start, and each
refusal names the setting that permits the value.

A check yields findings and raises nothing, so that `fleet doctor` can show all of them. Opens
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from fleet.config.schema import FleetConfig, WebConfig
from fleet.config.settings import EnvironmentSettings, is_example, normalize_secret
from fleet.config.values import ANY_ORIGIN
from fleet.core.errors import ConfigError

KEY = "FLEET_API_KEY"
MAKE_KEY = (
    f"make one with: export {KEY}=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')"
)
SECRET_PREFIX = "ek_"
MIN_KEY_CHARS = 16
MIN_DIFFERENT_CHARS = 5
"""Fewest different characters in an acceptable key. A random key of 16 hexadecimal digits has fewer
with a probability of one in two million.
"""
PLACEHOLDERS = (
    "admin",
    "apikey",
    "default",
    "example",
    "fleet",
    "fleetapikey",
    "key",
    "none",
    "null",
    "password",
    "secret",
    "test",
    "todo",
    "token",
    "yourapikey",
    "yourkey",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: the checked `subject`, and its configured `value`.

    `refusal`: cause and remedy if the value is unsafe or unusable. `permitted_by`: setting that
    permits an unsafe value, if it is set. `warning`: risk and remedy if the value is usable but
    risky. `param`: field or environment variable of the value.
    """

    subject: str
    value: str
    refusal: str = ""
    permitted_by: str = ""
    warning: str = ""
    param: str | None = None

    @property
    def refused(self) -> bool:
        return bool(self.refusal) and not self.permitted_by

    @property
    def verdict(self) -> str:
        """The result as a word, REFUSED, WARNING or OK, or PERMITTED with the setting that permits
        the value.
        """
        if self.refused:
            return "REFUSED"
        return (
            f"PERMITTED by {self.permitted_by}"
            if self.permitted_by
            else "WARNING"
            if self.warning
            else "OK"
        )

    @property
    def text(self) -> str:
        """The line that an operator reads: the refusal, else the warning, else the value."""
        return self.refusal if self.refused else self.warning or self.value


Check = Callable[[FleetConfig, EnvironmentSettings], Iterator[Finding]]


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches. Names other than localhost may
    resolve to any address.
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")


def check_gateway_address(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    web = config.web
    host = f"[{web.host}]" if ":" in web.host else web.host
    reach = "this machine only" if is_loopback(web.host) else "other machines can reach it"
    yield Finding(subject="gateway address", value=f"{web.scheme}://{host}:{web.port}, {reach}")


def check_api_key(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    key, host, listed = settings.api_key, config.web.host, config.web.keys_file
    permitted = "security.allow_no_key" if config.security.allow_no_key else ""
    permit = "or permit it: --set security.allow_no_key=true"
    refusal = ""
    # which name a proxy, and so clients on other machines
    is_local = is_loopback(host) and not config.web.allowed_hosts
    if key is not None and _is_placeholder(key, everywhere=is_local):
        refusal, permitted = f"{KEY}: the key is a placeholder; {MAKE_KEY}", ""
    elif key is not None and key.startswith(SECRET_PREFIX):
        refusal, permitted = (
            f"{KEY}: keys that begin with {SECRET_PREFIX} are short-lived client secrets; "
            f"{MAKE_KEY}",
            "",
        )
    elif is_local or (key is None and (listed is not None or is_loopback(host))):
        permitted = ""
    elif key is None:
        refusal = (
            f"web.host: {host} is not loopback and {KEY} is not set, nor is web.keys_file, so "
            f"others could use this gateway; {MAKE_KEY}, {permit}"
        )
    elif len(key.strip()) < MIN_KEY_CHARS or len(set(key)) < MIN_DIFFERENT_CHARS:
        weak = (
            f"shorter than {MIN_KEY_CHARS} characters, or of a few repeated ones, and can be "
            "guessed"
        )
        reach = (
            f"web.host is {host}" if not is_loopback(host) else "web.allowed_hosts names a proxy"
        )
        refusal = f"{KEY}: the key is {weak} ({reach}); {MAKE_KEY}, {permit}"
    value = f"{KEY} is {'not set' if key is None else 'weak' if refusal else 'set'}"
    value += f", web.keys_file is {listed}" if listed is not None else ""
    yield Finding(
        subject="API key",
        value=value,
        refusal=refusal,
        permitted_by=permitted if refusal else "",
        param=KEY,
    )


def _is_placeholder(key: str, *, everywhere: bool) -> bool:
    """Return True if a key or password is a placeholder such as `changeme`. `everywhere`: check
    only for the placeholders that are refused on loopback too.
    """
    core = normalize_secret(key)
    return len(set(core)) < 2 or is_example(key) or (not everywhere and core in PLACEHOLDERS)


def check_origins(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    origins, param = config.web.allowed_origins, "web.allowed_origins"
    refusal = "" if _has_key(config, settings) else find_any_origin_refusal(config.web)
    yield Finding(
        subject="web origins",
        value=", ".join(origins) or "own pages only",
        refusal=refusal,
        param=param,
    )


def find_any_origin_refusal(web: WebConfig) -> str:
    """Return the reason why a gateway without a key refuses `web.allowed_origins`; "" if the
    origins are acceptable.
    """
    if ANY_ORIGIN not in web.allowed_origins:
        return ""
    return (
        f"web.allowed_origins: * lets every web page use a gateway without a key; set {KEY}, "
        "or list the origins"
    )


def _has_key(config: FleetConfig, settings: EnvironmentSettings) -> bool:
    return settings.api_key is not None or config.web.keys_file is not None


def check_metrics(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    opened = config.web.open_metrics and _has_key(config, settings)
    value = (
        "/metrics is served without an API key"
        if opened
        else "/metrics requires an API key, if one is set"
    )
    permitted = "web.open_metrics" if opened else ""
    yield Finding(
        subject="metrics", value=value, refusal=value if opened else "", permitted_by=permitted
    )


GATEWAY_CHECKS: tuple[Check, ...] = (
    check_gateway_address,
    check_api_key,
    check_origins,
    check_metrics,
)


def run_checks(
    checks: Sequence[Check], config: FleetConfig, settings: EnvironmentSettings
) -> Iterator[Finding]:
    for check in checks:
        yield from check(config, settings)


def refuse_unsafe(
    config: FleetConfig, settings: EnvironmentSettings, checks: Sequence[Check] = GATEWAY_CHECKS
) -> None:
    """Run all checks of a gateway's configuration. Raises: ConfigError for the first value that is
    unsafe and not permitted.
    """
    for finding in run_checks(checks, config, settings):
        if finding.refused:
            raise ConfigError(finding.refusal, param=finding.param)
