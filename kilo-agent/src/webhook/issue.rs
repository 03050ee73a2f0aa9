//! Issues a certificate, signed by an authority that is created for it alone. The authority's key is
//! discarded, so that nobody can sign another one.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, Error, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// How long a certificate is valid.
pub const LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Tolerance for other clocks that are behind ours.
const EARLIER: Duration = Duration::from_secs(60 * 60);

/// A certificate, its private key, and the authority that has signed it; all in PEM.
#[derive(Debug)]
pub struct Issued {
    pub certificate: String,
    pub key: String,
    pub authority: String,
}

/// Issues a certificate for these DNS names, valid from now.
///
/// # Errors
/// When a name is not valid in a certificate, or there is no randomness.
pub fn issue(names: &[String], now: SystemTime) -> Result<Issued, Error> {
    let params = |names: &[String], common_name: &str| -> Result<CertificateParams, Error> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.not_before = (now - EARLIER).into();
        params.not_after = (now + LIFETIME).into();
        Ok(params)
    };
    let mut authority = params(&[], "kilo peer validation")?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority_key = KeyPair::generate()?;
    let issuer = Issuer::from_params(&authority, &authority_key);

    let mut server = params(names, names.first().map_or("", String::as_str))?;
    server.use_authority_key_identifier_extension = true;
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    Ok(Issued {
        certificate: server.signed_by(&key, &issuer)?.pem(),
        key: key.serialize_pem(),
        authority: authority.self_signed(&authority_key)?.pem(),
    })
}
