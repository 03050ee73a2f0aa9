//! Enums that are one byte of a message.

/// Declares an enum of one byte, and `from_u8`, which reads it: each value stands once.
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$about:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$about])* $value = $number,)+
        }

        impl $name {
            /// The value with this number; `None`: this version has none.
            #[inline(always)]
            pub const fn from_u8(number: u8) -> Option<Self> {
                match number {
                    $($number => Some(Self::$value),)+
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use wire_enum;
