//! Control addresses: the address that a gateway has inside tunnels, derived from its public key. A packet
//! from it that comes through a tunnel is from that gateway.

/// First bytes of every control address: a unique local prefix (RFC 4193) that nothing else uses.
pub const CONTROL_PREFIX: [u8; 6] = [0xfd, 0x6b, 0x69, 0x6c, 0x6f, 0x00];

/// The control address of the node whose public key has this SHA-256.
pub const fn control_address(hash: &[u8; 32]) -> [u8; 16] {
    let mut address = [0; 16];
    let mut i = 0;
    while i < 16 {
        address[i] = if i < 6 { CONTROL_PREFIX[i] } else { hash[i - 6] };
        i += 1;
    }
    address
}

/// The id in signals of the node with this control address; 0 for the zero address.
#[inline(always)]
pub const fn sender_id(control: &[u8; 16]) -> u64 {
    let [_, _, _, _, _, _, a, b, c, d, e, f, g, h, _, _] = *control;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}
