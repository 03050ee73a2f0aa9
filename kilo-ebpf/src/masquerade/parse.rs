//! Reading what identifies a packet's flow, into [`Work`](super::scratch::Work).

use aya_ebpf::{helpers::bpf_skb_load_bytes, programs::TcContext};
use kilo_common::{
    maps::{NAT_EGRESS, NAT_INGRESS},
    nat::{
        flow::{is_error, ports},
        transport::{self, Part, Transport},
    },
    packet::{IPV4_LEN, Ipv4, protocol},
};

use super::scratch::{Found, this_cpu};
use crate::{
    ip::{Ip as _, V6, octets},
    subprogram::{Skb, subprogram},
};

/// Reads the packet at `offset`, whose addresses are in the key already. Returns a [`Found`].
#[inline(always)]
pub fn packet(skb: Skb, offset: u32, v6: u32, direction: u32) -> u32 {
    if v6 == 0 { packet_v4(skb, offset, direction) } else { packet_v6(skb, offset, direction) }
}

/// The same for a packet inside an ICMP error: its end may be cut off, and its
/// addresses are read, too.
#[inline(always)]
pub fn inner(skb: Skb, offset: u32, v6: u32, direction: u32) -> u32 {
    if v6 == 0 { inner_v4(skb, offset, direction) } else { inner_v6(skb, offset, direction) }
}

subprogram! {
    fn packet_v4(offset: u32, direction: u32) -> u32 = read_packet_v4 as masquerade_parse_v4
}
subprogram! {
    fn packet_v6(offset: u32, direction: u32) -> u32 = read_packet_v6 as masquerade_parse_v6
}
subprogram! {
    fn inner_v4(offset: u32, direction: u32) -> u32 = read_inner_v4 as masquerade_parse_inner_v4
}
subprogram! {
    fn inner_v6(offset: u32, direction: u32) -> u32 = read_inner_v6 as masquerade_parse_inner_v6
}

#[inline(always)]
fn read_packet_v4(skb: Skb, offset: u32, direction: u32) -> u32 {
    read_v4(skb, offset, direction, false)
}

#[inline(always)]
fn read_inner_v4(skb: Skb, offset: u32, direction: u32) -> u32 {
    read_v4(skb, offset, direction, true)
}

#[inline(always)]
fn read_packet_v6(skb: Skb, offset: u32, direction: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let Ok(next_header) = ctx.load::<u8>(offset as usize + 6) else { return Found::Unknown as u32 };
    walk_v6(&ctx, offset, direction, next_header)
}

#[inline(always)]
fn read_inner_v6(skb: Skb, offset: u32, direction: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let (Ok(ip), Some(work)) = (V6::read_part(&ctx, offset as usize), this_cpu()) else {
        return Found::Unknown as u32;
    };
    work.key.src = octets(ip.src);
    work.key.dst = octets(ip.dst);
    walk_v6(&ctx, offset, direction, ip.next_header)
}

#[inline(always)]
fn read_v4(skb: Skb, offset: u32, direction: u32, quoted: bool) -> u32 {
    let ctx = TcContext::new(skb);
    let Some(work) = this_cpu() else { return Found::Unknown as u32 };
    let (to, length) = ((&raw mut work.header).cast(), IPV4_LEN as u32);
    // SAFETY: the buffer has that length.
    if unsafe { bpf_skb_load_bytes(skb.cast(), offset, to, length) } != 0 {
        return Found::Unknown as u32;
    }
    let header = &work.header;
    // Quoted packets are never BIG TCP; the length of others was checked.
    let most = if quoted { usize::from(u16::MAX) } else { usize::MAX };
    let Ok(ip) = Ipv4::parse(header, most) else { return Found::Unknown as u32 };
    if quoted {
        work.key.src = octets(Ipv4::mapped(ip.src));
        work.key.dst = octets(Ipv4::mapped(ip.dst));
    }
    identify(&ctx, offset, direction, false, &transport::ipv4(&ip, [work.header[4], work.header[5]]))
}

#[inline(always)]
fn walk_v6(ctx: &TcContext, offset: u32, direction: u32, next_header: u8) -> u32 {
    match transport::ipv6(next_header, |at| ctx.load(offset as usize + at).ok()) {
        Some(transport) => identify(ctx, offset, direction, true, &transport),
        None => Found::Unknown as u32,
    }
}

#[inline(always)]
fn identify(ctx: &TcContext, offset: u32, direction: u32, v6: bool, found: &Transport) -> u32 {
    let Some(work) = this_cpu() else { return Found::Unknown as u32 };
    work.transport = offset + found.offset as u32;
    work.key.protocol = found.protocol;
    work.key.direction = if direction == u32::from(NAT_EGRESS) { NAT_EGRESS } else { NAT_INGRESS };
    work.key.pad = [0; 2];
    work.fragment = u32::from(found.part != Part::Whole);
    work.id = found.id;
    work.tcp_flags = 0;
    if found.part == Part::Later {
        return Found::Later as u32;
    }
    let at = work.transport as usize;
    let Ok(start) = ctx.load::<[u8; 8]>(at) else { return Found::Unknown as u32 };
    work.start = start;
    if is_error(v6, found.protocol, start[0]) {
        return if work.fragmented() { Found::Unknown as u32 } else { Found::Error as u32 };
    }
    if let Some((src, dst)) = ports(v6, found.protocol, &start, work.key.direction) {
        work.key.src_port = src;
        work.key.dst_port = dst;
    } else if let Some((src, dst)) = ports(v6, found.protocol, &start, NAT_INGRESS) {
        work.key.src_port = src;
        work.key.dst_port = dst;
        return Found::EchoReply as u32;
    } else {
        return Found::Unknown as u32;
    }
    if found.protocol == protocol::TCP {
        work.tcp_flags = u32::from(ctx.load::<u8>(at + 13).unwrap_or(0));
    }
    Found::Flow as u32
}
