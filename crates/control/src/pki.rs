//! The fleet's certificate authority, and the certificates that it issues: to the centre at each start, and to each
//! host that joins.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::Digest;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use unirdma_fleet::Refusal;

/// Validity of certificates of hosts and centres. A centre makes itself a new one at each start.
const HOST_DAYS: i64 = 3_650;
/// Greatest difference between clocks.
const SKEW_DAYS: i64 = 1;

/// The organizational unit in client certificates of centres. Certificates of hosts have no organizational unit.
const CENTRES: &str = "uniRDMA centres";

/// The owner of a connection, by its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Somebody without a certificate, who may show a token.
    Anybody,
    /// A host of the fleet.
    Host(String),
    /// Another centre of the fleet.
    Centre,
}

/// The authority of a fleet, with its key.
pub struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

fn other(e: impl std::fmt::Display) -> io::Error {
    io::Error::other(e.to_string())
}

/// Writes a new file that only its owner can read.
///
/// # Errors
/// The file exists already, or cannot be written.
pub fn write_private(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

fn days(params: &mut CertificateParams, days: i64) {
    let now = std::time::SystemTime::now();
    let day = |n: i64| std::time::Duration::from_secs(n.unsigned_abs() * 86_400);
    (params.not_before, params.not_after) = ((now - day(SKEW_DAYS)).into(), (now + day(days)).into());
}

impl Authority {
    /// Makes an authority, and keeps it in `authority.pem` and `authority.key`.
    ///
    /// # Errors
    /// There is one already, or it cannot be written.
    pub fn create(dir: &Path, fleet: &str) -> io::Result<Authority> {
        let key = KeyPair::generate().map_err(other)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("uniRDMA fleet {fleet}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        days(&mut params, 2 * HOST_DAYS);
        let pem = params.self_signed(&key).map_err(other)?.pem();
        write_private(&dir.join("authority.key"), &key.serialize_pem())?;
        std::fs::write(dir.join("authority.pem"), pem)?;
        Authority::load(dir)
    }

    /// Reads the authority from a centre's directory.
    ///
    /// # Errors
    /// It is not there, or is not an authority.
    pub fn load(dir: &Path) -> io::Result<Authority> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).map_err(|e| {
                io::Error::new(
                    e.kind(),
                    format!("cannot read {}: {e}; `unirdma control init {}` makes it", path.display(), dir.display()),
                )
            })
        };
        let (pem, key) = (read("authority.pem")?, read("authority.key")?);
        let wrong = |e: &dyn std::fmt::Display| other(format!("{} has no usable authority: {e}", dir.display()));
        let key = KeyPair::from_pem(&key).map_err(|e| wrong(&e))?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| wrong(&e))?;
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|e| wrong(&e))?;
        Ok(Authority { pem, der, issuer })
    }

    /// Its certificate (PEM).
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The pin by which a joining host authenticates the authority: SHA-256 of its certificate, in hexadecimal digits.
    pub fn pin(&self) -> String {
        sha2::Sha256::digest(&self.der).iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Issues the certificate of a host, for the host's own key.
    ///
    /// # Errors
    /// The request is not a certificate request.
    pub fn host(&self, name: &str, request: &str) -> Result<String, Refusal> {
        let wrong = |e: rcgen::Error| Refusal::invalid(format_args!("the host's certificate request is none: {e}"));
        if request.len() > 16 << 10 {
            return Err(Refusal::invalid("the host's certificate request is too long"));
        }
        let mut csr = CertificateSigningRequestParams::from_pem(request).map_err(wrong)?;
        // Only the key is taken from the host's request.
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        days(&mut params, HOST_DAYS);
        csr.params = params;
        csr.signed_by(&self.issuer).map(|c| c.pem()).map_err(wrong)
    }

    /// TLS settings for calls to other centres: a client certificate that only centres have, and the fleet's authority.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn client(&self) -> io::Result<ClientTlsConfig> {
        let key = KeyPair::generate().map_err(other)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "uniRDMA centre");
        params.distinguished_name.push(DnType::OrganizationalUnitName, CENTRES);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        days(&mut params, HOST_DAYS);
        let certificate = params.signed_by(&key, &self.issuer).map_err(other)?;
        let identity = Identity::from_pem(certificate.pem(), key.serialize_pem());
        Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.pem)).identity(identity))
    }

    /// TLS settings of the server: a certificate for these names, and verification of client certificates.
    ///
    /// # Errors
    /// A name is invalid.
    pub fn server(&self, names: &[String]) -> io::Result<ServerConfig> {
        let key = KeyPair::generate().map_err(other)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "uniRDMA centre");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => {
                    let wrong = |e: rcgen::Error| {
                        other(format!("`{name}` is neither an IP address nor a name of the DNS: {e}"))
                    };
                    SanType::DnsName(name.as_str().try_into().map_err(wrong)?)
                }
            });
        }
        days(&mut params, HOST_DAYS);
        let certificate = params.signed_by(&key, &self.issuer).map_err(other)?;
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).map_err(other)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let hosts =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).allow_unauthenticated();
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(other)?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(other)?
            .with_client_cert_verifier(hosts.build().map_err(other)?)
            // The authority's certificate is sent along: a host that joins knows its hash.
            .with_single_cert(vec![certificate.der().clone(), self.der.clone()], key)
            .map_err(other)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// The owner of a verified certificate: a host, or a centre.
pub fn caller_of(certificate: &CertificateDer<'_>) -> Option<Caller> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    if parsed.subject().iter_organizational_unit().any(|u| u.as_str() == Ok(CENTRES)) {
        return Some(Caller::Centre);
    }
    let name = parsed.subject().iter_common_name().next()?.as_str().ok()?;
    Some(Caller::Host(name.to_owned()))
}

/// A name by which others reach this machine: its listening address, or its host name if that is unspecified.
pub fn name_of(listen: IpAddr) -> String {
    let called = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|n| n.trim().to_owned());
    let called = called.filter(|n| listen.is_unspecified() && !n.is_empty());
    called.unwrap_or_else(|| listen.to_string())
}

/// Names by which this machine is reached: loopback, its host name, and its addresses.
pub fn own_names(listen: IpAddr) -> Vec<String> {
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".into(), "::1".into()];
    if !listen.is_unspecified() {
        names.push(listen.to_string());
    }
    names.extend(std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|n| n.trim().to_owned()));
    names.extend(local_v4(&std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default()));
    names.extend(local_v6(&std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default()));
    names.retain(|n| {
        n.parse::<IpAddr>().is_ok()
            || (!n.is_empty() && n.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b)))
    });
    names.sort();
    names.dedup();
    names
}

/// The addresses of a machine in the kernel's routing table: a leaf, and below it `/32 host LOCAL`.
fn local_v4(trie: &str) -> Vec<String> {
    let mut leaf = None;
    let mut found = Vec::new();
    for line in trie.lines() {
        if let Some((_, address)) = line.split_once("|-- ") {
            leaf = Some(address.trim());
        } else if line.contains("/32 host LOCAL") {
            found.extend(leaf.map(str::to_owned));
        }
    }
    found
}

/// The addresses in the kernel's table of IPv6 addresses. A line begins with 32 hexadecimal digits.
fn local_v6(table: &str) -> Vec<String> {
    let bits = table.lines().filter_map(|l| u128::from_str_radix(l.split_whitespace().next()?, 16).ok());
    bits.map(|b| std::net::Ipv6Addr::from_bits(b).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_say_who_their_owner_is() {
        let dir = std::env::temp_dir().join(format!("unirdma-pki-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let authority = Authority::create(&dir, "f").unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        authority.client().unwrap();
        let caller = |pem: &str| caller_of(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap());
        let key = KeyPair::generate().unwrap();
        // Whatever a host asks for, it gets the certificate of a host.
        let mut wish = CertificateParams::default();
        wish.distinguished_name.push(DnType::OrganizationalUnitName, CENTRES);
        wish.distinguished_name.push(DnType::CommonName, "other");
        let request = wish.serialize_request(&key).unwrap().pem().unwrap();
        assert_eq!(caller(&authority.host("h1", &request).unwrap()), Some(Caller::Host("h1".into())));
        wish.use_authority_key_identifier_extension = true;
        assert_eq!(caller(&wish.signed_by(&key, &authority.issuer).unwrap().pem()), Some(Caller::Centre));
    }

    #[test]
    fn the_kernels_tables_are_read() {
        let trie = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.0\n        /24 link UNICAST\n        |-- 10.1.2.3\n           /32 host LOCAL\n";
        assert_eq!(local_v4(trie), ["10.1.2.3"]);
        assert_eq!(local_v6("00000000000000000000000000000001 01 80 10 80       lo\n"), ["::1"]);
        assert!(own_names("10.9.9.9".parse().unwrap()).contains(&"10.9.9.9".to_owned()));
    }
}
