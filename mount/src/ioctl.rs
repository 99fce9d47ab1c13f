//! The `ioctl`s of a file below `claims/`: what has no form among the calls that every file has.

/// `_IOR('L', 1, u64)`: the epoch of the lease that this open file description holds, in whichever process and by
/// whichever copy it is asked; 0 where it holds none. `ESTALE` once it lost its lease, `ENOTTY` for any other file.
///
/// Unlike a read it takes no offset along, and no reader of the record can be given another's epoch by it.
pub const LEASEFS_IOC_HOLDS: u32 = ior(b'L', 1, size_of::<u64>());

/// `_IOR` of `asm-generic/ioctl.h`; the kernel reads direction and size from the number, and copies the answer itself.
const fn ior(kind: u8, number: u8, size: usize) -> u32 {
    const READ: u32 = 2;
    READ << 30 | (size as u32) << 16 | (kind as u32) << 8 | number as u32
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_number_is_that_of_the_macro() {
        assert_eq!(super::LEASEFS_IOC_HOLDS, 0x8008_4c01);
    }
}
