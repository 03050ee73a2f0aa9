//! Targets for the packet arithmetic in `kilo-common`.

use arbitrary::{Result, Unstructured};
use kilo_common::{
    checksum as sums,
    encap::{self, Inner},
    event::{DropEvent, EVENT_BYTES},
    maps::{Config, NAT_EGRESS, NAT_INGRESS, NatKey, SignalKey, VXLAN_PORT},
    nat::{
        self,
        flow::{self, Layout, layout, mapped},
        transport::{self, Part},
    },
    packet::{self, ETHERNET_LEN, IPV4_LEN, IPV6_LEN, Ipv4, Ipv6, protocol},
    signal::{self, kernel},
    siphash::Key,
};
use kilo_host::dataplane::decode;

/// Bytes of the longest generated packet.
const LONGEST: usize = 2_048;

/// Headers are parsed within the packet, and the monitor shows any event.
pub fn headers(data: &[u8]) {
    extensions(data);
    if let Some(bytes) = data.first_chunk::<IPV4_LEN>()
        && let Ok(ip) = Ipv4::parse(bytes, data.len())
    {
        assert!((IPV4_LEN..=60).contains(&ip.header_len), "{ip:?}");
        assert!(ip.header_len <= (ip.total_len as usize) && (ip.total_len as usize) <= data.len());
        assert_eq!(ip.is_fragment(), ip.fragment & 0x2000 != 0 || ip.fragment & 0x1fff != 0);
        assert_eq!((&ip.src[..], &ip.dst[..]), (&data[12..16], &data[16..20]));
    }
    if let Some(bytes) = data.first_chunk::<IPV6_LEN>()
        && let Ok(ip) = Ipv6::parse(bytes, data.len())
    {
        assert!(usize::from(ip.payload_len) + IPV6_LEN <= data.len());
        assert_eq!((&ip.src[..], &ip.dst[..]), (&data[8..24], &data[24..40]));
        let dst = std::net::Ipv6Addr::from(ip.dst);
        let local =
            dst.is_loopback() || dst.is_unspecified() || dst.is_multicast() || dst.is_unicast_link_local();
        assert_eq!(packet::never_steered_v6(packet::halves(ip.dst)), local, "{dst}");
    }
    for ethernet in [false, true] {
        for length in [0, data.len(), usize::MAX] {
            let shown = decode::headers(data, length, ethernet);
            assert!(shown.iter().all(|header| !header.to_string().is_empty()));
        }
    }
    if let Some(bytes) = data.first_chunk::<EVENT_BYTES>() {
        let event = DropEvent::from_bytes(bytes);
        let ethernet = event.hook().is_none_or(kilo_common::event::Hook::has_ethernet);
        decode::headers(event.bytes(), event.length as usize, ethernet);
    }
}

/// A signal that parses is written back as it was, except for its tag, and is authentic only if its kind has
/// one.
pub fn signal(data: &[u8]) {
    let Ok(signal) = signal::parse(data) else { return };
    assert!(data.len() <= signal::LONGEST && data.len().is_multiple_of(8));
    let key = Key([1, 2]);
    let mut out = [0; signal::LONGEST];
    let length = signal::write(&mut out, &signal, Some(key)).unwrap();
    assert_eq!(length, data.len());
    let said = length - if signal.kind.has_tag() { signal::TAG } else { 0 };
    assert_eq!(out[..said], data[..said]);
    assert_eq!(signal::is_authentic(&out[..length], key), signal.kind.has_tag());
    let start = data.first_chunk::<{ signal::HEADER }>().unwrap();
    let header = signal::header(start, data.len()).unwrap();
    assert_eq!((header.kind, header.term, header.sender), (signal.kind, signal.term, signal.sender));
    answered(&out[..length], &header, key);
}

/// A signal of the length that BPF programs handle: they check its tag as the agent does, and the agent can
/// parse their answer.
fn answered(bytes: &[u8], header: &signal::Header, key: Key) {
    let Some(words) = bytes.first_chunk::<{ signal::KERNEL }>().filter(|_| bytes.len() == signal::KERNEL)
    else {
        return;
    };
    let (words, []) = words.as_chunks::<8>() else { return };
    let mut raw: kernel::Raw = std::array::from_fn(|i| u64::from_ne_bytes(words[i]));
    let node = SignalKey { key: key.0, sender: header.sender, ..SignalKey::default() };
    assert_eq!(kernel::authentic(&raw, &node).is_ok(), signal::is_authentic(bytes, key));
    assert!(kernel::announced(&raw, header, &node).is_err(), "a node that may not lead is obeyed");
    if kernel::on_lan(header.kind) != kernel::Taken::Answer {
        return;
    }
    let said =
        kernel::Answer { kind: signal::Kind::Present, term: header.term, sender: 1, cookie: 2, gateway: 3 };
    kernel::answer(&mut raw, said, &node);
    let bytes: Vec<u8> = raw.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let read = signal::parse(&bytes).unwrap();
    assert_eq!((read.kind, read.term, read.nonce), (said.kind, header.term, header.nonce));
    assert!(signal::is_authentic(&bytes, key));
}

/// The outer header is valid, and the packet behind it is unchanged.
pub fn encapsulation(data: &[u8]) {
    // Too few bytes are not an input.
    let _ = encapsulated(&mut Unstructured::new(data));
}

fn encapsulated(input: &mut Unstructured<'_>) -> Result<()> {
    let (local, remote): ([u8; 16], [u8; 16]) = input.arbitrary()?;
    let (tos, v6, hash) = input.arbitrary()?;
    let packet = input.bytes(input.len().min(LONGEST))?;
    let inner = Inner { len: length(packet).into(), tos, v6, hash };
    let (local4, remote4) = (first_four(local), first_four(remote));
    let ip = if v6 { protocol::IPV6 } else { protocol::IPIP };

    let mut frame = [0; ETHERNET_LEN + encap::IPIP_OVERHEAD];
    encap::ipip_frame(&mut frame, &local4, &remote4, &inner);
    assert_eq!(behind_ipv4(&[&frame, packet].concat(), local4, remote4, tos, ip, true), packet);

    let mut frame = [0; ETHERNET_LEN + encap::IPIP_OVERHEAD_V6];
    encap::ipip_frame_v6(&mut frame, &local, &remote, &inner);
    assert_eq!(behind_ipv6(&[&frame, packet].concat(), local, remote, tos, ip), packet);

    let mut frame = [0; ETHERNET_LEN + encap::VXLAN_OVERHEAD];
    encap::vxlan_frame(&mut frame, &local4, &remote4, &inner);
    let sent = [&frame, packet].concat();
    assert_eq!(behind_vxlan(behind_ipv4(&sent, local4, remote4, tos, protocol::UDP, false), v6), packet);

    let mut frame = [0; ETHERNET_LEN + encap::VXLAN_OVERHEAD_V6];
    encap::vxlan_frame_v6(&mut frame, &local, &remote, &inner);
    let sent = [&frame, packet].concat();
    assert_eq!(behind_vxlan(behind_ipv6(&sent, local, remote, tos, protocol::UDP), v6), packet);
    Ok(())
}

fn length(bytes: &[u8]) -> u16 {
    u16::try_from(bytes.len()).unwrap_or(u16::MAX)
}

fn first_four([a, b, c, d, ..]: [u8; 16]) -> [u8; 4] {
    [a, b, c, d]
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Checks Ethernet and IPv4 header; returns what the latter holds.
fn behind_ipv4(
    frame: &[u8],
    local: [u8; 4],
    remote: [u8; 4],
    tos: u8,
    next: u8,
    dont_fragment: bool,
) -> &[u8] {
    assert_eq!(word(frame, 12), packet::ETHERTYPE_IPV4);
    let datagram = &frame[ETHERNET_LEN..];
    let header = *datagram.first_chunk().unwrap();
    assert_eq!(sums::header(&header), 0);
    let ip = Ipv4::parse(&header, datagram.len()).unwrap();
    assert_eq!((ip.src, ip.dst, ip.tos, ip.protocol, ip.ttl), (local, remote, tos, next, encap::OUTER_TTL));
    assert_eq!((ip.fragment & 0x4000 != 0, ip.is_fragment()), (dont_fragment, false));
    &datagram[ip.header_len..(ip.total_len as usize)]
}

fn behind_ipv6(frame: &[u8], local: [u8; 16], remote: [u8; 16], tos: u8, next: u8) -> &[u8] {
    assert_eq!(word(frame, 12), packet::ETHERTYPE_IPV6);
    let datagram = &frame[ETHERNET_LEN..];
    let header = *datagram.first_chunk::<IPV6_LEN>().unwrap();
    let ip = Ipv6::parse(&header, datagram.len()).unwrap();
    assert_eq!((ip.src, ip.dst, ip.traffic_class, ip.next_header), (local, remote, tos, next));
    assert_eq!(ip.hop_limit, encap::OUTER_TTL);
    &datagram[IPV6_LEN..IPV6_LEN + usize::from(ip.payload_len)]
}

fn behind_vxlan(udp: &[u8], v6: bool) -> &[u8] {
    assert!(word(udp, 0) >= 0xc000, "a dynamic port");
    assert_eq!((word(udp, 2), usize::from(word(udp, 4)), word(udp, 6)), (VXLAN_PORT, udp.len(), 0));
    assert_eq!(udp[encap::UDP_LEN..][..encap::VXLAN_LEN], encap::vxlan_header());
    let ethernet = encap::UDP_LEN + encap::VXLAN_LEN;
    assert_eq!(udp[ethernet..][..ETHERNET_LEN], encap::vxlan_ethernet(v6));
    &udp[encap::VXLAN_INNER..]
}

/// The Internet checksum of any bytes, by its definition.
fn full(bytes: &[u8]) -> u16 {
    let mut sum: u64 = bytes
        .chunks(2)
        .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

/// An incremental update gives the same as a full computation, for the TTL, too.
pub fn checksum(data: &[u8]) {
    let _ = updated(&mut Unstructured::new(data));
}

fn updated(input: &mut Unstructured<'_>) -> Result<()> {
    let mut header: [u8; IPV4_LEN] = input.arbitrary()?;
    header[0] = 0x45;
    header[10..12].copy_from_slice(&[0, 0]);
    let mut sum = sums::header(&header);
    assert_eq!(sum, full(&header));
    while !input.is_empty() {
        let (at, new): (u8, u16) = input.arbitrary()?;
        let at = usize::from(at) % (IPV4_LEN / 2) * 2;
        // The first word is what keeps a header from being all zeroes.
        if at == 0 || at == 10 {
            continue;
        }
        sum = sums::update(sum, word(&header, at), new);
        header[at..at + 2].copy_from_slice(&new.to_be_bytes());
        assert_eq!(sum, sums::header(&header));
    }
    match packet::next_ttl(header[8], sum) {
        None => assert!(header[8] <= 1),
        Some((ttl, sum)) => {
            assert_eq!(ttl + 1, header[8]);
            header[8] = ttl;
            assert_eq!(sum, sums::header(&header));
        }
    }
    Ok(())
}

/// The reply to a masqueraded packet, translated back, is the reply to the packet itself; checksums are right
/// all the way.
pub fn nat(data: &[u8]) {
    let _ = masqueraded(&mut Unstructured::new(data));
}

/// ICMP types of one family.
struct Family {
    v6: bool,
    echo: u8,
    echo_reply: u8,
}

fn masqueraded(input: &mut Unstructured<'_>) -> Result<()> {
    let config = Config {
        nat_port_min: input.arbitrary()?,
        nat_port_max: input.arbitrary()?,
        wireguard_port: input.arbitrary()?,
        ..Config::default()
    };
    let family = if input.arbitrary()? {
        Family { v6: true, echo: 128, echo_reply: 129 }
    } else {
        Family { v6: false, echo: 8, echo_reply: 0 }
    };
    let (start, attempt): (u32, u8) = input.arbitrary()?;
    let all = [protocol::TCP, protocol::UDP, protocol::ICMP, protocol::ICMPV6, protocol::SCTP, 47];
    let number = *input.choose(&all)?;
    let address = |input: &mut Unstructured<'_>| -> Result<[u8; 16]> {
        if family.v6 { input.arbitrary() } else { Ok(mapped(input.arbitrary()?)) }
    };
    let (src, dst, public) = (address(input)?, address(input)?, address(input)?);
    let mut payload = input.bytes(input.len().min(LONGEST))?.to_vec();
    let Some(first) = payload.first_chunk::<8>().copied() else { return Ok(()) };
    let ports = flow::ports(family.v6, number, &first, NAT_EGRESS);
    let known = match number {
        protocol::ICMP => !family.v6 && first[0] == family.echo,
        protocol::ICMPV6 => family.v6 && first[0] == family.echo,
        other => other != 47,
    };
    assert_eq!(ports.is_some(), known);
    let (Some((src_port, dst_port)), Some(layout)) = (ports, layout(number)) else { return Ok(()) };
    let key = NatKey { src, dst, src_port, dst_port, protocol: number, direction: NAT_EGRESS, pad: [0; 2] };
    let own = u16::from_be_bytes(src_port);
    let port = nat::candidate_port(number, own, u32::from(attempt), start, &config);
    let Some(port) = port else { return Ok(()) };
    assert!(number != protocol::UDP || (port != config.wireguard_port && port != VXLAN_PORT));
    assert!(port == own || (config.nat_port_min..=config.nat_port_max).contains(&port));
    let partner = key.partner(&public, port.to_be_bytes());
    assert_eq!(partner.partner(&src, src_port), key);
    let Some(checksum) = layout.checksum else { return Ok(()) };
    if payload.len() < checksum + 2 {
        return Ok(());
    }

    seal(&mut payload, checksum, number, &src, &dst);
    let before = payload.clone();
    // Out: the source becomes ours.
    replace(&mut payload, &layout, checksum, layout.src_port, (&src, &public), port);
    assert_eq!(sum_of(&payload, &layout, number, &public, &dst), 0, "out");
    // The remote end answers.
    let mut reply = mirrored(&payload, number, &family);
    seal(&mut reply, checksum, number, &dst, &public);
    let Some(start) = reply.first_chunk::<8>() else { return Ok(()) };
    let seen = flow::ports(family.v6, number, start, NAT_INGRESS);
    assert_eq!(seen, Some((partner.src_port, partner.dst_port)));
    assert_eq!((partner.src, partner.dst, partner.direction), (dst, public, NAT_INGRESS));
    // In: the destination becomes the pod's again.
    replace(&mut reply, &layout, checksum, layout.dst_port, (&public, &src), own);
    let mut wanted = mirrored(&before, number, &family);
    let zero = |(at, byte): (usize, &u8)| *byte == 0 || at == checksum || at == checksum + 1;
    if !layout.pseudo_header && wanted.iter().enumerate().all(zero) {
        // Zeroes alone have the sum 0xffff, which no incremental update reaches (RFC 1624, section 3).
        return Ok(());
    }
    assert_eq!(sum_of(&reply, &layout, number, &dst, &src), 0, "in");
    seal(&mut wanted, checksum, number, &dst, &src);
    assert_eq!(reply, wanted);
    Ok(())
}

/// Extension headers lead to an offset within reach, or nowhere.
fn extensions(data: &[u8]) {
    let Some((&next, behind)) = data.split_first() else { return };
    let load = |at: usize| behind.get(at - IPV6_LEN..at - IPV6_LEN + 8)?.try_into().ok();
    let Some(found) = transport::ipv6(next, load) else { return };
    assert!(found.offset >= IPV6_LEN && found.offset <= IPV6_LEN + behind.len() + 2_048);
    assert_eq!(found.offset % 8, 0);
    let walkable =
        [protocol::HOP_BY_HOP, protocol::DESTINATION_OPTIONS, protocol::ROUTING, protocol::FRAGMENT];
    assert!(found.part == Part::Later || !walkable.contains(&found.protocol));
}

/// Writes address and port as the programs do: nothing but the port and the
/// checksum is touched, and the latter by the differences alone.
fn replace(
    payload: &mut [u8],
    layout: &Layout,
    checksum: usize,
    port_at: usize,
    (old, new): (&[u8; 16], &[u8; 16]),
    port: u16,
) {
    let mut sum = word(payload, checksum);
    sum = sums::update(sum, word(payload, port_at), port);
    if layout.pseudo_header {
        for at in (0..16).step_by(2) {
            sum = sums::update(sum, word(old, at), word(new, at));
        }
    }
    payload[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    payload[checksum..checksum + 2].copy_from_slice(&sum.to_be_bytes());
}

/// What the other end sends back: ports exchanged, a reply for a request.
fn mirrored(payload: &[u8], number: u8, family: &Family) -> Vec<u8> {
    let mut reply = payload.to_vec();
    if flow::is_icmp(number) {
        reply[0] = family.echo_reply;
    } else {
        reply[..4].rotate_left(2);
    }
    reply
}

/// Pseudo-header and payload. The prefix of mapped addresses adds 0xffff, which does not change a sum.
fn pseudo(payload: &[u8], number: u8, src: &[u8; 16], dst: &[u8; 16]) -> Vec<u8> {
    let length = length(payload).to_be_bytes();
    [&src[..], dst, &[0, number], &length, payload].concat()
}

/// 0 when the checksum in the packet is right.
fn sum_of(payload: &[u8], layout: &Layout, number: u8, src: &[u8; 16], dst: &[u8; 16]) -> u16 {
    if layout.pseudo_header { full(&pseudo(payload, number, src, dst)) } else { full(payload) }
}

/// Writes the right checksum.
fn seal(payload: &mut [u8], at: usize, number: u8, src: &[u8; 16], dst: &[u8; 16]) {
    payload[at..at + 2].copy_from_slice(&[0, 0]);
    let Some(layout) = layout(number) else { return };
    let sum = sum_of(payload, &layout, number, src, dst);
    payload[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}
