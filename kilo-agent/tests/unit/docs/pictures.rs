//! The pictures of docs/concepts.md match what an agent draws (`/graph`) for the meshes on that page.

use std::{collections::BTreeMap, fs};

use kilo_agent::http::drawing;
use kilo_core::{
    settings::Granularity,
    topology::{Mesh, Node, Peer, TunnelPaths},
    wireguard::key::PublicKey,
};

use super::root;

/// The page's five nodes, and optionally the laptop.
fn mesh(granularity: Granularity, with_laptop: bool) -> Mesh {
    let places =
        [("a1", "east", 1_u8), ("a2", "east", 2), ("a3", "east", 3), ("b1", "west", 4), ("b2", "west", 5)];
    let nodes = places.map(|(name, location, number)| Node {
        name: name.to_owned(),
        location: location.to_owned(),
        endpoint: format!("192.0.2.{number}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.{}.0.{number}/24", number / 4 + 1).parse().ok(),
        pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
        ..Node::default()
    });
    let laptop = Peer {
        name: "laptop".to_owned(),
        allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
        endpoint: None,
        persistent_keepalive: 10,
        preshared_key: None,
        public_key: PublicKey([9; 32]),
        follows: false,
    };
    let peers: BTreeMap<_, _> = with_laptop.then(|| ("laptop".to_owned(), laptop)).into_iter().collect();
    Mesh::new(&nodes, &peers, granularity, "10.4.0.0/16".parse().unwrap())
}

#[test]
fn the_pictures_of_the_concepts_are_drawn_by_the_agent() {
    let wanted = [
        ("two-locations", mesh(Granularity::Location, false)),
        ("full-mesh", mesh(Granularity::Full, false)),
        ("with-a-peer", mesh(Granularity::Location, true)),
    ];
    for (name, mesh) in wanted {
        let path = root().join("docs/pictures").join(name).with_extension("svg");
        // The site also has a dark theme.
        let text = drawing::svg(&mesh, &TunnelPaths::default()).replacen(
            "<style>",
            "<style>svg{background:#fff}",
            1,
        );
        if std::env::var_os("KILO_BLESS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &text).unwrap();
        }
        assert!(
            fs::read_to_string(&path).unwrap_or_default() == text,
            "{} is not what the agent draws: KILO_BLESS=1 cargo test -p kilo-agent --test unit docs",
            path.display()
        );
    }
}
