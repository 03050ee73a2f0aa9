//! Enums that a message carries as one byte.

/// Declares a one-byte enum and its `from_u8`, so that each number is written only once.
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$about:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$about])* $value = $number,)+
        }

        impl $name {
            /// The variant with this number; `None` if this version does not know it.
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
