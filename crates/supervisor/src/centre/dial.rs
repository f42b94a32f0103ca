//! Connections to the control centre: TCP, TLS and gRPC.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme, version::TLS13};
use tonic::transport::{Channel, Endpoint};
use unirdma_fleet::{root_cause, said};

/// Time limit for connecting, and for the answer to a call.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// A text that is no address of a centre.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UrlError {
    #[error("`{0}` is no address of a control centre: write https://ADDRESS:PORT")]
    Form(String),
    #[error("`{0}` is not of this machine itself, and so takes https")]
    Plain(String),
    #[error("`{0}` has centres with https and with http: they are of one fleet, so all have one of them")]
    Mixed(String),
}

/// Why a centre is not reached, or refuses.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("a certificate cannot be read")]
    Certificate,
    #[error("the key cannot be read")]
    Key,
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{}", root_cause(.0))]
    Transport(#[from] tonic::transport::Error),
    #[error("{}", said(.0))]
    Refused(#[from] tonic::Status),
    #[error("it does not answer")]
    Timeout,
}

/// The address of a centre.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    pub text: String,
    host: String,
    port: u16,
    pub tls: bool,
}

impl Url {
    /// Parses `https://ADDR:PORT`, or `http://` and a loopback address.
    pub fn parse(text: &str) -> Result<Url, UrlError> {
        let wrong = || UrlError::Form(text.into());
        let (scheme, rest) = text.trim_end_matches('/').split_once("://").ok_or_else(wrong)?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let (host, port) = (host.trim_start_matches('[').trim_end_matches(']'), port.parse().map_err(|_| wrong())?);
        let url = Url { text: text.into(), host: host.into(), port, tls: scheme == "https" };
        let here = host == "localhost" || host.parse().is_ok_and(|a: IpAddr| a.is_loopback());
        match scheme {
            "https" if ServerName::try_from(host).is_ok() => Ok(url),
            "http" if here => Ok(url),
            "http" => Err(UrlError::Plain(text.into())),
            _ => Err(wrong()),
        }
    }
}

impl Url {
    /// Parses the addresses of one or more centres of a fleet, separated by commas.
    pub fn parse_all(text: &str) -> Result<Vec<Url>, UrlError> {
        let urls = text.split(',').map(|t| Url::parse(t.trim())).collect::<Result<Vec<Url>, _>>()?;
        if urls.iter().any(|u| u.tls != urls[0].tls) {
            return Err(UrlError::Mixed(text.into()));
        }
        Ok(urls)
    }
}

/// How the centre and this host authenticate each other.
#[derive(Clone)]
pub(super) enum Trust {
    /// Not at all: plain text within this machine.
    None,
    Tls(Arc<ClientConfig>),
}

impl Trust {
    /// Both sides have certificates of `authority` (PEM).
    ///
    /// # Errors
    /// A certificate or the key is invalid.
    pub fn mutual(authority: &str, certificate: &str, key: &str) -> Result<Trust, DialError> {
        let certificates = |pem: &str| {
            let all: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
            all.ok().filter(|c| !c.is_empty()).ok_or(DialError::Certificate)
        };
        let mut roots = RootCertStore::empty();
        for c in certificates(authority)? {
            roots.add(c)?;
        }
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|_| DialError::Key)?;
        let config = builder().with_root_certificates(roots).with_client_auth_cert(certificates(certificate)?, key);
        Ok(Trust::of(config?))
    }

    /// The centre has a certificate of the authority whose certificate has this SHA-256. This host has no certificate
    /// yet.
    pub fn pinned(pin: [u8; 32]) -> Trust {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        let verifier = Arc::new(Pinned { pin, algorithms });
        Trust::of(builder().dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
    }

    fn of(mut config: ClientConfig) -> Trust {
        config.alpn_protocols = vec![b"h2".to_vec()];
        Trust::Tls(Arc::new(config))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn builder() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    // Cannot fail: the provider has the cipher suites of TLS 1.3.
    let builder = ClientConfig::builder_with_provider(provider());
    builder.with_protocol_versions(&[&TLS13]).expect("ring has the suites of TLS 1.3")
}

/// Parses 64 hexadecimal digits as 32 bytes.
pub(super) fn fingerprint(text: &str) -> Option<[u8; 32]> {
    let digits = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let byte = |i: usize| u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    bytes.filter(|_| digits)?.try_into().ok()
}

/// Accepts a server whose certificate is issued by the authority with this fingerprint, whose certificate the server
/// sends along.
#[derive(Debug)]
struct Pinned {
    pin: [u8; 32],
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let pinned = |c: &&CertificateDer<'_>| ::ring::digest::digest(&::ring::digest::SHA256, c).as_ref() == self.pin;
        let authority = chain.iter().find(pinned).ok_or_else(|| {
            rustls::Error::General("its certificates are not of the authority that the token names".into())
        })?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let verifier = verifier.map_err(|e| rustls::Error::General(e.to_string()))?;
        verifier.verify_server_cert(leaf, chain, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn dial(url: &Url, trust: &Trust) -> io::Result<Box<dyn Stream>> {
    let tcp = TcpStream::connect((url.host.as_str(), url.port)).await?;
    tcp.set_nodelay(true)?;
    let Trust::Tls(config) = trust else { return Ok(Box::new(tcp)) };
    let name = ServerName::try_from(url.host.clone()).map_err(io::Error::other)?;
    Ok(Box::new(TlsConnector::from(config.clone()).connect(name, tcp).await?))
}

/// A connection for one or more calls. It does not reconnect when it breaks.
///
/// # Errors
/// Why there is none.
pub(super) async fn channel(url: &Url, trust: &Trust) -> Result<Channel, DialError> {
    let connect = async {
        let stream = dial(url, trust).await?;
        let mut slot = Some(TokioIo::new(stream));
        let once = tower::service_fn(move |_| {
            let stream = slot.take().ok_or_else(|| io::Error::other("the connection has ended"));
            async move { stream }
        });
        // The scheme has no meaning here: the stream is encrypted already, or does not leave this machine.
        let host = if url.host.contains(':') { format!("[{}]", url.host) } else { url.host.clone() };
        let endpoint = Endpoint::from_shared(format!("http://{host}:{}", url.port))?;
        Ok(endpoint.connect_with_connector(once).await?)
    };
    tokio::time::timeout(PATIENCE, connect).await.unwrap_or(Err(DialError::Timeout))
}

/// A connection to the first centre that can be reached.
///
/// # Errors
/// Why the last centre cannot be reached.
pub(super) async fn first(urls: &[Url], trust: &Trust) -> Result<Channel, DialError> {
    let mut last = Err(DialError::Timeout);
    for url in urls {
        last = channel(url, trust).await;
        if last.is_ok() {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_centres_are_read_and_plain_text_stays_here() {
        let url = Url::parse("https://192.168.7.100:7471/").unwrap();
        assert_eq!((&*url.host, url.port, url.tls), ("192.168.7.100", 7471, true));
        assert_eq!(Url::parse("https://[fd00::1]:7471").unwrap().host, "fd00::1");
        assert_eq!(Url::parse("https://centre.example:1").unwrap().host, "centre.example");
        assert!(!Url::parse("http://127.0.0.1:7471").unwrap().tls && Url::parse("http://localhost:1").is_ok());
        for bad in ["", "192.168.7.100:7471", "https://x", "https://x:99999", "ftp://x:1", "https://a b:1"] {
            assert!(matches!(Url::parse(bad), Err(UrlError::Form(_))), "{bad}");
        }
        assert!(matches!(Url::parse("http://192.168.7.100:7471"), Err(UrlError::Plain(_))));
        let two = Url::parse_all("https://a.example:1, https://b.example:2").unwrap();
        assert_eq!((two.len(), two[1].port), (2, 2));
        assert!(matches!(Url::parse_all("https://a.example:1,http://127.0.0.1:2"), Err(UrlError::Mixed(_))));
        assert!(matches!(Url::parse_all("https://a.example:1,"), Err(UrlError::Form(_))));
    }

    #[test]
    fn fingerprints_have_64_digits() {
        assert_eq!(fingerprint(&"0a".repeat(32)), Some([10; 32]));
        for bad in [String::new(), "0a".repeat(31), "0g".repeat(32), "+1".repeat(32)] {
            assert_eq!(fingerprint(&bad), None);
        }
    }
}
