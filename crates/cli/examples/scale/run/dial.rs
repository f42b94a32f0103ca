//! Connections to a centre by TLS, with a certificate of its authority on one side or on both. Bytes are counted below
//! TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Channel, Endpoint};

/// Longest time to make a connection. A thousand hosts connect at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes of a host's connections.
#[derive(Default)]
pub struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Acquire)
    }

    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Acquire)
    }
}

/// TLS configuration that trusts `authority` (PEM). `own`: certificate and key (PEM) of this end; `None` for no client
/// certificate.
pub fn trust(authority: &str, own: Option<(&str, &str)>) -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.as_bytes()).map_err(io::Error::other)?)
        .map_err(io::Error::other)?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder =
        builder.with_safe_default_protocol_versions().map_err(io::Error::other)?.with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(io::Error::other)?;
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(io::Error::other)?;
            builder.with_client_auth_cert(vec![certificate], key).map_err(io::Error::other)?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Connects to `address`, `IP:PORT`. The connection is not made again when it breaks.
pub async fn channel(address: &str, tls: &Arc<ClientConfig>, traffic: Option<Arc<Traffic>>) -> io::Result<Channel> {
    let connect = async {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let ip = address.rsplit_once(':').map_or(address, |(ip, _)| ip).to_owned();
        let name = ServerName::try_from(ip).map_err(io::Error::other)?;
        let counted = Counted { tcp, traffic: traffic.unwrap_or_default() };
        let stream = TlsConnector::from(tls.clone()).connect(name, counted).await?;
        let mut slot = Some(TokioIo::new(stream));
        let once = tower::service_fn(move |_| {
            let stream = slot.take().ok_or_else(|| io::Error::other("the connection has ended"));
            async move { stream }
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(io::Error::other)?;
        endpoint.connect_with_connector(once).await.map_err(io::Error::other)
    };
    tokio::time::timeout(PATIENCE, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// A TCP connection whose bytes are counted.
struct Counted {
    tcp: TcpStream,
    traffic: Arc<Traffic>,
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let done = Pin::new(&mut self.tcp).poll_read(cx, buf);
        self.traffic.received.fetch_add((buf.filled().len() - before) as u64, Ordering::AcqRel);
        done
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.tcp).poll_write(cx, buf);
        if let Poll::Ready(Ok(n)) = &done {
            self.traffic.sent.fetch_add(*n as u64, Ordering::AcqRel);
        }
        done
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
