//! Links, addresses and routes of this host.
