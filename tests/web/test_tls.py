"""TLS certificates of the gateway, configured or self-signed, and the lines printed at the
start.
"""

import ipaddress
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from cryptography import x509
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.config import load_config
from fleet.config.schema import FleetConfig, WebConfig
from fleet.core.errors import ConfigError, FleetError
from fleet.process.lan_address import lan_address
from tests.support import free_port, wait_until
from tests.web.conftest import Loaded, serving
from tests.web.test_serve import start_with
from web.http.tls import TlsFiles, tls_files
from web.serve import startup_lines

SSH = {"SSH_CONNECTION": "10.0.0.9 51000 10.0.0.7 22"}


def config(folder: Path, **web: object) -> FleetConfig:
    return FleetConfig.model_validate({"data_dir": str(folder), "web": web})


@pytest.fixture
def running(
    loaded: Loaded, redis_url: str, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    given = json.dumps(
        {
            "data_dir": str(tmp_path),
            "web": {"port": port, "model_name": "omni", "tls": "self-signed"},
        }
    )
    with start_with(given, loaded, redis_url) as process:
        yield process, port
        process.kill()


def test_self_signed_certificate_has_names_of_machine(
    running: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    _, port = running
    cert = tmp_path / "tls" / "cert.pem"
    wait_until(cert.is_file, "the certificate", timeout_s=30)
    trusting = ssl.create_default_context(cafile=str(cert))

    def answers() -> httpx.Response | None:
        try:
            return httpx.get(f"https://localhost:{port}/health", verify=trusting)
        except httpx.TransportError:
            return None

    answer = wait_until(answers, "https to be served", timeout_s=30)
    assert answer is not None and answer.status_code == 200
    assert httpx.get(f"https://127.0.0.1:{port}/health", verify=trusting).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://localhost:{port}/health")


def test_certificate_is_reused_and_key_is_private(tmp_path: Path) -> None:
    files = tls_files(config(tmp_path, tls="self-signed"))
    assert files is not None and files.key.stat().st_mode & 0o077 == 0
    first = files.cert.read_bytes()
    assert (
        tls_files(config(tmp_path, tls="self-signed")) == files and files.cert.read_bytes() == first
    )
    # another address to serve: it would not fit any more
    tls_files(config(tmp_path, tls="self-signed", host="192.0.2.7"))
    assert files.cert.read_bytes() != first
    names = x509.load_pem_x509_certificate(
        files.cert.read_bytes()
    ).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert ipaddress.ip_address("192.0.2.7") in names.value.get_values_for_type(x509.IPAddress)
    assert "localhost" in names.value.get_values_for_type(x509.DNSName)


def test_invalid_self_signed_certificate_is_replaced(tmp_path: Path) -> None:
    files = tls_files(config(tmp_path, tls="self-signed"))
    assert files is not None
    files.cert.write_text("not a certificate")
    tls_files(config(tmp_path, tls="self-signed"))
    assert b"BEGIN CERTIFICATE" in files.cert.read_bytes()


def test_configured_certificate_is_used(tmp_path: Path) -> None:
    made = tls_files(config(tmp_path, tls="self-signed"))
    assert made is not None
    assert tls_files(config(tmp_path / "x", tls_cert=str(made.cert), tls_key=str(made.key))) == made
    with pytest.raises(ConfigError, match="web.tls_key: there is no file"):
        tls_files(config(tmp_path, tls_cert=str(made.cert), tls_key=str(tmp_path / "gone.pem")))
    assert tls_files(config(tmp_path)) is None


def test_command_writes_a_certificate_that_clients_trust(loaded: Loaded, tmp_path: Path) -> None:
    """The certificate serves exactly the given hosts, for a client that was given it: Python's and
    Node's.
    """
    folder = tmp_path / "tls"
    args = ["cert", "localhost", "192.0.2.7", "bücher.example", "--out", str(folder)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0 and "web.tls_cert=" in done.output, done.output
    cert, key = folder / "cert.pem", folder / "key.pem"
    assert key.stat().st_mode & 0o077 == 0
    read = x509.load_pem_x509_certificate(cert.read_bytes())
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "xn--bcher-kva.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("192.0.2.7")]
    trusting = ssl.create_default_context(cafile=str(cert))
    with serving(loaded, tls=TlsFiles(cert=cert, key=key)) as gateway:
        by_name = gateway.url.replace("127.0.0.1", "localhost")
        assert httpx.get(f"{by_name}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url}/health", verify=trusting)
        program = f"fetch({by_name + '/health'!r}).then(answer => console.log(answer.status))"
        env = {"PATH": "/usr/bin:/bin", "NODE_EXTRA_CA_CERTS": str(cert)}
        if (node := shutil.which("node")) is not None:
            done = subprocess.run(
                [node, "-e", program],
                capture_output=True,
                text=True,
                timeout=60,
                env=env,
                check=False,
            )
            assert done.stdout.strip() == "200", done.stderr


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        (["https://voice.example.org"], "no host name or address"),
        (["voice.example.org:8000"], "no host name or address"),
        ([""], "no host name or address"),
        ([], "cert.pem exists"),
    ],
)
def test_command_refuses_what_is_no_host_and_replaces_no_file(
    tmp_path: Path, args: list[str], reported: str
) -> None:
    kept = tmp_path / "cert.pem"
    if not args:
        kept.write_text("kept")
    done = CliRunner().invoke(app, ["cert", *args, "--out", str(tmp_path)])
    assert isinstance(done.exception, FleetError) and reported in done.exception.message
    assert [path.name for path in tmp_path.iterdir()] == ([] if args else ["cert.pem"])


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (("web.tls_cert=a.pem",), "web.tls_cert.*web.tls_key is missing"),
        (("web.tls_key=a.pem",), "web.tls_key.*web.tls_cert is missing"),
        (
            ("web.tls=self-signed", "web.tls_cert=a.pem", "web.tls_key=b.pem"),
            "web.tls.*set only one of them",
        ),
        (("web.tls=letsencrypt",), "web.tls.*self-signed"),
    ],
)
def test_inconsistent_tls_settings_are_refused(given: tuple[str, ...], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        load_config(None, given)


def test_ssh_command_is_printed_over_ssh() -> None:
    (console, way) = startup_lines(WebConfig(), 8000, SSH)
    assert console == "console http://localhost:8000/  API http://localhost:8000/v1"
    assert "ssh -L 8000:127.0.0.1:8000 " in way and "@10.0.0.7 " in way
    other = {"SSH_CONNECTION": "10.0.0.9 51000 10.0.0.7 2222"}
    assert "ssh -p 2222 -L 8000:127.0.0.1:8000 " in startup_lines(WebConfig(), 8000, other)[1]


def test_no_ssh_command_is_printed_for_local_user() -> None:
    assert len(startup_lines(WebConfig(), 8000, {})) == 1
    assert len(startup_lines(WebConfig(), 8000, {"SSH_CONNECTION": "junk"})) == 1


def test_plain_http_on_network_prints_microphone_hint() -> None:
    everywhere = WebConfig(host="0.0.0.0")
    (_, way) = startup_lines(everywhere, 8000, {}, find_address=lambda: None)
    assert "ssh -L 8000:127.0.0.1:8000 USER@HOST" in way and "web.tls=self-signed" in way
    assert "@10.0.0.7" in startup_lines(everywhere, 8000, SSH)[1]
    secure = WebConfig(host="0.0.0.0", tls="self-signed")
    console = "console https://localhost:8000/  API https://localhost:8000/v1"
    assert startup_lines(secure, 8000, {}, find_address=lambda: None) == [console]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_gateway_on_all_addresses_prints_the_one_for_phones(host: str) -> None:
    secure = WebConfig(host=host, tls="self-signed")
    (console,) = startup_lines(secure, 8000, {}, find_address=lambda: "192.168.1.5")
    assert console.endswith("  from other devices https://192.168.1.5:8000/")
    assert (
        "192.168" not in startup_lines(WebConfig(), 8000, {}, find_address=lambda: "192.168.1.5")[0]
    )


def test_address_for_phones_is_an_address_of_this_machine() -> None:
    own = {each.address for of_card in psutil.net_if_addrs().values() for each in of_card}
    assert lan_address() in {*own, None}
