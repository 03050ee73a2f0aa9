//! The webhook's certificate, replaced while it runs when its files or its Secret change.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kilo_core::errors::Cause;
use parking_lot::{Mutex, RwLock};
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

/// Why the files cannot be used; never contains their content.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error underneath.
        source: io::Error,
    },
    /// A file has no PEM of the required kind.
    #[error("{path} holds no usable {what} in PEM: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        /// The parser's error.
        source: Cause,
    },
    /// The certificate and key do not match, or are of a kind that TLS does not use.
    #[error("the certificate of {certificate} and the key of {key} cannot be used together: {source}")]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error underneath.
        source: rustls::Error,
    },
}

type Files = (Vec<u8>, Vec<u8>);

/// The certificate and key in use.
#[derive(Debug)]
pub struct Certificate {
    paths: (PathBuf, PathBuf),
    current: RwLock<Arc<CertifiedKey>>,
    /// Content of the files when they were last read.
    seen: Mutex<Files>,
}

impl Certificate {
    /// Reads the files for the first time.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, CertificateError> {
        let paths = (certificate.to_owned(), key.to_owned());
        let files = read(&paths)?;
        Self::of(paths, files)
    }

    /// Uses the content of a Secret; `paths` are for errors.
    pub fn of(paths: (PathBuf, PathBuf), files: Files) -> Result<Self, CertificateError> {
        let current = RwLock::new(Arc::new(parse(&paths, &files)?));
        Ok(Self { paths, current, seen: Mutex::new(files) })
    }

    /// Takes over changed files; returns whether they had changed. Files that do not match (while they are
    /// being replaced) leave the certificate in use as it was, and are reported as an error once.
    pub fn reload(&self) -> Result<bool, CertificateError> {
        self.take(read(&self.paths)?)
    }

    /// [`Self::reload`] with the content of a Secret.
    pub fn take(&self, files: Files) -> Result<bool, CertificateError> {
        let mut seen = self.seen.lock();
        if *seen == files {
            return Ok(false);
        }
        let parsed = parse(&self.paths, &files);
        *seen = files;
        *self.current.write() = Arc::new(parsed?);
        Ok(true)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read()))
    }
}

fn read(paths: &(PathBuf, PathBuf)) -> Result<Files, CertificateError> {
    let read = |path: &PathBuf| {
        fs::read(path).map_err(|source| CertificateError::Read { path: path.clone(), source })
    };
    Ok((read(&paths.0)?, read(&paths.1)?))
}

fn parse(paths: &(PathBuf, PathBuf), files: &Files) -> Result<CertifiedKey, CertificateError> {
    let pem =
        |path: &Path, what, source: Cause| CertificateError::Pem { path: path.to_owned(), what, source };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&files.0)
        .collect::<Result<_, _>>()
        .map_err(|error| pem(&paths.0, "certificate", error.into()))?;
    if chain.is_empty() {
        return Err(pem(&paths.0, "certificate", "there is none".into()));
    }
    let key = PrivateKeyDer::from_pem_slice(&files.1)
        .map_err(|error| pem(&paths.1, "private key", error.into()))?;
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider()).map_err(|source| {
        CertificateError::Pair { certificate: paths.0.clone(), key: paths.1.clone(), source }
    })
}
